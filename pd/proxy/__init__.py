"""The proxy: HTTP APIs, tokenization, routing, health. Text to clients, tokens to nodes."""
