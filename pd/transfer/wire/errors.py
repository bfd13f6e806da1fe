"""Errors about data of a peer."""

from __future__ import annotations


class PeerDataError(Exception):
    """A peer sent or announced KV data that violates its reservation or the format.

    The message names the value. We close the peer's connection.
    """
