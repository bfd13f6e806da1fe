"""One-sided writes with faults from a script: the backend of the fault tests."""
