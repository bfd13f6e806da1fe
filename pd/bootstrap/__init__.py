"""Handshake of decode and prefill nodes: the registry of a prefill node, and its client."""

from pd.bootstrap.client import handshake
from pd.bootstrap.peers import PeerDirectory
from pd.bootstrap.registry import Registry
from pd.bootstrap.server import make_bootstrap_app

__all__ = ["PeerDirectory", "Registry", "handshake", "make_bootstrap_app"]
