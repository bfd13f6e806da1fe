"""Handshake of decode and prefill nodes: the registry of each prefill node, and its client.

Imports no torch and nothing of the engine.
"""

from pd.bootstrap.client import handshake
from pd.bootstrap.peers import PeerDirectory
from pd.bootstrap.registry import Registry
from pd.bootstrap.server import make_bootstrap_app

__all__ = ["PeerDirectory", "Registry", "handshake", "make_bootstrap_app"]
