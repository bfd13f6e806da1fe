"""Connections between nodes: opening them, proving who is there, and reading them."""
