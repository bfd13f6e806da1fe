"""Backends whose library writes into staging slots: NIXL and Mooncake."""
