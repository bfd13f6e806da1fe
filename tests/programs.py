"""Programs outside of packages, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def import_program(path: str) -> Any:
    """Import a file of the repository, such as ``scripts/a.py``."""
    spec = importlib.util.spec_from_file_location(f"program_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
