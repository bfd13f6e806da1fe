"""Connections between nodes: how they are opened, proven and read."""
