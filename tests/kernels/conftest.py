from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def triton_works() -> None:
    """Skip tests if Triton's kernels run neither on a GPU nor in the interpreter."""
    # It decides where kernels run, so only tests that ask for them may import it.
    from triton_device import skip_unless_interpreter_works

    skip_unless_interpreter_works()
