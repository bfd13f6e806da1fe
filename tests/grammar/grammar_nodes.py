"""Nodes of the model of random weights that constrain output."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster
from grammar_model import EOS, VOCAB_SIZE
from tiny import tiny_head

from pd import assembly
from pd.grammar.child import Vocabulary
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import Grammars

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster import Pending

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "ngram", "speculative_adaptive": "off"},
    "eagle": {"speculative_algorithm": "eagle", "speculative_adaptive": "off"},
    "tree": {
        "speculative_algorithm": "eagle",
        "speculative_adaptive": "off",
        "speculative_topk": 3,
        "speculative_num_draft_tokens": 6,
    },
    "half right": {"speculative_algorithm": "ngram", "speculative_adaptive": "off"},
}


@contextmanager
def share_grammars(model: Path, vocab_size: int = VOCAB_SIZE, eos: int = EOS) -> Iterator[Grammars]:
    """All nodes share what compiles, whose start takes longer than a node's."""
    vocabulary = Vocabulary(str(model / "tokenizer.json"), vocab_size, [eos])
    made = Grammars(vocabulary, CompileLimits(10.0, 1 << 30, 64 << 20), 1 << 26)
    close, made.close = made.close, lambda: None  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "make_grammars", lambda *_: made)
        yield made
    close()


def cluster_of(model: Path, kind: str, **settings: Any) -> Cluster:
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    if settings.get("speculative_algorithm") == "eagle":
        settings["speculative_draft_model"] = tiny_head("eagle3", vocab_size=VOCAB_SIZE)
    defaults = {"load_format": "dummy", "page_size": 4, "kv_cache_tokens": 8192}
    return Cluster(model, *counts, **defaults | settings)


def ask(cluster: Cluster, prompt: list[int], **params: Any) -> Pending:
    nodes = list(cluster.pair) if cluster.prefill else [cluster.unified[0]]
    defaults = {"max_tokens": 200, "ignore_eos": False, "stop_token_ids": ()}
    return cluster.client.generate(prompt, nodes, **defaults | params)
