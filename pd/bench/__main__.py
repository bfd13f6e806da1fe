"""``python -m pd.bench``: ``pd-bench`` from a source tree without an installation."""

from __future__ import annotations

import sys

from pd.cli import bench

if __name__ == "__main__":
    sys.exit(bench())
