"""The small, trained model in this package (docs/embedded-model.md)."""

from __future__ import annotations

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "embedded"
