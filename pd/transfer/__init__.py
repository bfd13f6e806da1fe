"""Moving KV from prefill to decode nodes: the interface (``base``) and a file per backend."""

from pd.transfer.factory import BACKENDS, make_transfer_manager

__all__ = ["BACKENDS", "make_transfer_manager"]
