"""Backends whose library writes into staging buffers: NIXL and Mooncake."""
