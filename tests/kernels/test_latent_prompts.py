"""A node whose prompts are expanded from latents by the kernels for GPUs, while it decodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import is_greedy, make_checkpoint
from cluster import Cluster, random_prompts
from waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def test_kernels_for_gpus_expand_prompts_and_decode_over_latents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Chunks of a prompt that the kernels expand, mixed with sequences that decode."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from pd.kernels.attention import expanded, registry
    from pd.kernels.attention.triton_backend import TritonAttention

    if not torch.cuda.is_available():
        # The backend is for GPUs only, because the interpreter is slow.
        monkeypatch.setattr(registry, "_find_obstacle", lambda *_: "")
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 8)
    expand, steps = TritonAttention.attend_latents, set()

    def note_step(backend: TritonAttention, *arguments: Any) -> torch.Tensor:
        steps.add((backend._expanded is not None, bool(backend._launches)))
        return expand(backend, *arguments)

    monkeypatch.setattr(TritonAttention, "attend_latents", note_step)
    model = make_checkpoint("deepseek_v2", tmp_path)
    short, *long = random_prompts(seed, [30, 60, 75])
    with Cluster(
        model, 0, 0, 1, chunked_prefill_size=24, attention_backend="triton", page_size=4
    ) as cluster:
        node = cluster.unified[0]
        first = cluster.client.generate(short, [node], max_tokens=12)
        wait_until(lambda: len(first.choices[0].tokens) > 1, 60)
        others = [cluster.client.generate(prompt, [node], max_tokens=3) for prompt in long]
        for prompt, request in zip([short, *long], [first, *others], strict=True):
            assert is_greedy(model, prompt, request.tokens(200)), seed
    assert steps == {(True, True), (True, False), (False, True)}
