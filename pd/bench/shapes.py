"""Models that our programs know by name: pd has their ``config.json``, and weights are dummies.

``mixtral-8x1b`` is not a published model. It has TinyLlama's shape with Mixtral's experts, so it is
small enough to measure next to the 8B models. ``gpt-oss-20b`` has experts in MXFP4, and
``gpt-oss-20b-bf16`` has the same in bfloat16. ``llama-3.1-8b-fp8`` has weights in fp8 with a scale
for each row, and ``llama-3.1-8b-fp8-blocks`` with one for each block of 128 by 128, as the other
shapes ``-fp8`` have.
"""

from __future__ import annotations

from pathlib import Path

from pd.embedded import EMBEDDED_MODEL

_SHAPES = Path(__file__).resolve().parents[1] / "assets" / "shapes"
SHAPES = (
    "llama-3.1-8b",
    "llama-3.1-8b-fp8",
    "llama-3.1-8b-fp8-blocks",
    "llama-3.1-70b",
    "llama-3.2-1b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3-30b-a3b-fp8",
    "deepseek-v2-lite",
    "deepseek-v2-lite-fp8",
    "glm-4.7-flash",
    "glm-4.7-flash-fp8",
    "mixtral-8x1b",
    "gpt-oss-20b",
    "gpt-oss-20b-bf16",
)
NAMES = (*SHAPES, "embedded")
# EAGLE heads. The name of each starts with the name of its model.
EAGLE_SHAPES = ("llama-3.1-8b-eagle3",)


def model_directory(name: str) -> Path:
    """Return the directory of a named model; any other name is a path."""
    if name == "embedded":
        return EMBEDDED_MODEL
    return _SHAPES / name if name in (*SHAPES, *EAGLE_SHAPES) else Path(name).expanduser()
