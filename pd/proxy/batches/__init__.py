"""Batches that the proxy runs itself, with requests to its own application."""
