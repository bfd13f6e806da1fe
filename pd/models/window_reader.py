"""Reads the sliding windows of a ``config.json``. Importing this does not import torch.

Each function returns the ``windows`` of :class:`pd.models.config.ModelConfig`. A window at least as
long as the context changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.models.refusals import refuse_setting
from pd.models.rope_reader import read_context_length
from pd.models.settings import get_positive_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.models.settings import Settings

_FULL, _SLIDING = "full_attention", "sliding_attention"


def refuse_windows(cfg: Settings) -> tuple[int, ...]:
    """Raise UnsupportedModelError if some layer has a window; for architectures without one."""
    _refuse_sliding_layers(cfg)
    if _read_window(cfg):
        refuse_setting("sliding_window", cfg["sliding_window"])
    return ()


def read_common_window(cfg: Settings) -> tuple[int, ...]:
    """Read the window that all layers have.

    Raises:
        UsageError: it is no positive integer.
        UnsupportedModelError: ``layer_types`` says that only some layers have it.
    """
    _refuse_sliding_layers(cfg)
    return _list_windows(cfg, [_SLIDING] * get_positive_int(cfg, "num_hidden_layers"))


def read_layer_windows(cfg: Settings, default: Sequence[str]) -> tuple[int, ...]:
    """Read the window of the layers that ``layer_types`` lists.

    Args:
        default: the types of layers if the file does not list them.

    Raises:
        UsageError: the window is no positive integer.
        UnsupportedModelError: the types are not implemented, or the window is missing.
    """
    kinds = cfg.get("layer_types") or list(default)
    num_layers = get_positive_int(cfg, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        refuse_setting("layer_types", kinds)
    unknown = [kind for kind in kinds if kind not in (_FULL, _SLIDING)]
    if unknown:
        refuse_setting("layer_types", unknown[0])
    if _SLIDING in kinds and cfg.get("sliding_window") is None:
        refuse_setting("layer_types without a sliding_window", _SLIDING)
    return _list_windows(cfg, kinds)


def _list_windows(cfg: Settings, kinds: Sequence[str]) -> tuple[int, ...]:
    window = _read_window(cfg)
    if window == 0 or _SLIDING not in kinds:
        return ()
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _read_window(cfg: Settings) -> int:
    """Read the window; 0 if there is none, or if it is as long as the context."""
    if cfg.get("sliding_window") is None:
        return 0
    window = get_positive_int(cfg, "sliding_window")
    return window if window < read_context_length(cfg) else 0


def _refuse_sliding_layers(cfg: Settings) -> None:
    """Raise UnsupportedModelError if ``layer_types`` lists layers that are not full."""
    kinds = cfg.get("layer_types") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind != _FULL for kind in kinds):
        refuse_setting("layer_types", sorted(set(map(str, kinds))))
