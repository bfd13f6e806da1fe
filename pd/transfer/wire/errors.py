"""Errors about data that a peer sent."""

from __future__ import annotations


class PeerDataError(Exception):
    """A peer sent KV data, or announced some, which its reservation or the format does not allow.
    The message names the value; the peer's connection is closed."""
