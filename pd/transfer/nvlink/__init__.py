"""The backend that stores straight into the pool of another GPU of the same host."""
