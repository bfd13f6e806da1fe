"""Several proxy processes behind one port (``--workers``): a parent that accepts connections and
looks after its children, each of which is a whole proxy."""
