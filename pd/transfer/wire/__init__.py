"""Connections between nodes: how we open them, prove the peers' identity, and read them."""
