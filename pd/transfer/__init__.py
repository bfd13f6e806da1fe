"""Moving KV from prefill to decode nodes: the interface (``base``) and a folder per backend."""

from pd.transfer.registry import backend_names, make_transfer_manager

__all__ = ["backend_names", "make_transfer_manager"]
