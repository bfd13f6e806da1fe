"""Connections between nodes: opening them, proving the peers' identity, and reading them."""
