"""Several proxy processes on one port (``--workers``).

A parent accepts connections and supervises its children. Each child is a complete proxy.
"""
