"""Where tests of Triton kernels run: on a GPU, or interpreted on the CPU.

Import before anything that imports Triton.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0" if ON_GPU else "cpu"
# The interpreter's bfloat16 is wrong in places. Errors are relative to the largest value.
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3)]
if ON_GPU:
    DTYPES.append((torch.bfloat16, 1.5e-2))
EACH_DTYPE = pytest.mark.parametrize(("dtype", "error"), DTYPES)


def seeded() -> torch.Generator:
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Draw float32 on the CPU."""
    return torch.randn(shape, generator=generator) * scale


def assert_near(actual: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    """Assert that everything is written (NaN never passes), and off by at most ``error`` of the
    largest."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual).all())
    if actual.numel():
        largest = max(float(expected.abs().max()), 1e-3)
        assert float((actual - expected).abs().max()) <= error * largest


def skip_unless_interpreter_works() -> None:
    """Skip the test with numpy 2.4, because Triton 3.6's interpreter fails with it."""
    from pd.kernels.activation_triton import silu_and_mul

    try:
        silu_and_mul(torch.ones(1, 2, device=DEVICE))
    except Exception as error:
        if ON_GPU or "only 0-dimensional arrays" not in str(error):
            raise
        pytest.skip(f"Triton's interpreter does not work with numpy {np.__version__}")
