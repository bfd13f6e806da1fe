"""KV moves from prefill to decode nodes: the interface (``base``) and a folder for each backend."""

from pd.transfer.registry import backend_names, make_transfer_manager

__all__ = ["backend_names", "make_transfer_manager"]
