"""Moving KV from prefill to decode nodes: the interface (``base``) and a folder per backend."""

from pd.transfer.registry import BACKENDS, make_transfer_manager

__all__ = ["BACKENDS", "make_transfer_manager"]
