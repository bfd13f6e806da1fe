"""Publishes changes of a node's prefix cache in the format of vLLM's KV events."""
