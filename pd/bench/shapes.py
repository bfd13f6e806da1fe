"""Models that programs here know by name: ``config.json`` comes with pd, weights are dummies.

``mixtral-8x1b`` is no published model: TinyLlama's shape with Mixtral's experts, small enough to be
measured beside the 8B ones.
"""

from __future__ import annotations

from pathlib import Path

from pd.embedded import EMBEDDED_MODEL

_SHAPES = Path(__file__).resolve().parents[1] / "assets" / "shapes"
SHAPES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "qwen3-8b", "mixtral-8x1b")
NAMES = (*SHAPES, "embedded")
# EAGLE heads, each for the model whose name its own starts with.
EAGLE_SHAPES = ("llama-3.1-8b-eagle3",)


def model_directory(name: str) -> Path:
    """Directory of a named model; any other name is a path."""
    if name == "embedded":
        return EMBEDDED_MODEL
    return _SHAPES / name if name in (*SHAPES, *EAGLE_SHAPES) else Path(name).expanduser()
