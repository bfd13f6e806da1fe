"""Settings of the offline models that tests make."""

from __future__ import annotations

import os
from typing import Any

# As in tests/cluster.py: answers are compared in float32, and a machine has few cores.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": os.environ.get("PD_TEST_DEVICE", "cpu"),
    "cpu_threads": 1,
    "kv_cache_tokens": 8192,
}
