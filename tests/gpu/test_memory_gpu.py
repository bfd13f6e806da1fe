"""What a node takes of a GPU: as much as it was given, no more with time, or a clear no.

The GPU has to be free of others, other workers of ``pytest -n`` among them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from processes import deployment

from pd.core.config import NodeConfig
from pd.core.errors import SetupError
from pd.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20


def engine(model: Path, **settings) -> Engine:
    config = {"role": "unified", "device": f"cuda:{GPUS - 1}", "max_running_requests": 32}
    return Engine.build(NodeConfig(model=model, **{**config, **settings}))


@pytest.mark.parametrize(
    ("fraction", "drafts"),
    [(0.3, {}), (0.5, {}), (0.5, {"speculative_algorithm": "ngram"})],
    ids=["0.3", "0.5", "with drafts"],
)
def test_the_pool_leaves_what_mem_fraction_says(
    tmp_path: Path, fraction: float, drafts: dict[str, str]
) -> None:
    """With a vocabulary of which logits take much, and graphs of many sizes."""
    path = make_checkpoint("llama3", tmp_path, head_dim=128, vocab_size=131_072)
    torch.cuda.empty_cache()
    built = engine(
        path, dtype="bfloat16", mem_fraction=fraction, max_running_requests=256, **drafts
    )
    free, total = torch.cuda.mem_get_info(GPUS - 1)
    promised = (1 - fraction) * total
    print(f"promised {promised / MIB:.0f} MiB, free {free / MIB:.0f}")
    # Graphs of chunks are not tried before the pool is sized.
    assert abs(free - promised) < 128 * MIB
    assert sum(built.runner.graphs.sizes) * 131_072 * 2 > 512 * MIB
    assert (built.runner.verify_graphs is None) == (not drafts)
    built.close()


def test_what_does_not_fit_is_said_in_words(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(SetupError, match=r"--kv-cache-tokens 1000000000 needs .* GiB"):
        engine(checkpoint("qwen3"), kv_cache_tokens=1_000_000_000)
    with pytest.raises(SetupError, match="no memory is left for the KV cache"):
        engine(checkpoint("qwen3"), mem_fraction=1e-6)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, GPUS - 1)
    try:
        with pytest.raises(SetupError, match="does not fit into cuda"):
            engine(checkpoint("qwen3"), kv_cache_tokens=1024)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPUS - 1)


@pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs"))],
    ids=["alone", "tensor parallel"],
)
@pytest.mark.timeout(300)
def test_nodes_of_a_split_do_not_grow(tmp_path: Path, seed: int, size: int) -> None:
    """In bfloat16, with whatever attention and transfer ``auto`` means here."""
    model = make_checkpoint("llama3", tmp_path, head_dim=128)
    second = size if 2 * size <= GPUS else 0
    flags = ["--dtype", "bfloat16", "--transfer-backend", "auto", "--tp-size", str(size)]
    flags += ["--kv-cache-tokens", "65536", "--max-running-requests", "32"]
    rng = random.Random(seed)

    def used() -> int:
        return sum(total - free for free, total in map(torch.cuda.mem_get_info, range(GPUS)))

    with deployment(
        model,
        tmp_path,
        node_flags=flags,
        prefill_flags=["--device", "cuda:0"],
        decode_flags=["--device", f"cuda:{second}"],
    ) as running:
        running.wait_ready(250.0)

        def serve(count: int) -> None:
            for _ in range(count // 25):
                lengths = [rng.randrange(1, 1500) for _ in range(25)]
                prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
                streams = [running.stream(p, rng.randrange(1, 40)) for p in prompts]
                assert all(stream.join().succeeded() for stream in streams)
            running.wait_idle()

        serve(250)
        before = used()
        serve(500)
        after = used()
    print(f"seed {seed}: {before / MIB:.0f} MiB, then {after / MIB:.0f}")
    assert after <= before + 16 * MIB
