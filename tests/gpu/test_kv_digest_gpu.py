"""``--kv-digest`` between pools on GPUs: two if there are, else one that both nodes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from e2e.backends import MOONCAKE, NIXL, NVLINK, TCP, Backend
from e2e.damage import Asked, check_damage, make_asked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.fixture(scope="module")
def asked(checkpoint: Callable[[str], Path], seed: int) -> Asked:
    """What one node makes of them, on the CPU unless PD_TEST_DEVICE says otherwise."""
    return make_asked(checkpoint("qwen3"), seed)


@pytest.mark.parametrize("backend", [NVLINK, NIXL, MOONCAKE, TCP], ids=str)
def test_a_flipped_bit_fails_its_request_alone(
    checkpoint: Callable[[str], Path], tmp_path: Path, asked: Asked, backend: Backend
) -> None:
    backend.require()
    devices = [f"cuda:{number}" for number in range(min(2, torch.cuda.device_count()))]
    flags = ("--dtype", "float32", "--max-running-requests", "16")
    check_damage(checkpoint("qwen3"), tmp_path, asked, backend, devices=devices, node_flags=flags)
