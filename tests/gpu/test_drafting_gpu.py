"""Draft models on a GPU: a node's passes are CUDA graphs, and its pool leaves room for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import make_checkpoint
from cluster import random_prompts
from counters import counter
from tiny import tiny_cluster, tiny_model

from pd.core.config import NodeConfig
from pd.engine.draft_model import DraftModel
from pd.engine.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
DRAFTED = 4
PROMPTS = [*random_prompts(4, [5, 40, 90]), *random_prompts(5, [300])]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.8},
]


def answers_of(**settings: Any) -> tuple[list[list[int]], list[int]]:
    """Answers to :data:`PROMPTS`, asked alone and then together, by a node whose draft model is the
    same as its own; and the tokens of each pass of that model which no graph computed."""
    with tiny_cluster(
        0,
        0,
        1,
        device="cuda",
        kv_cache_tokens=8192,
        max_running_requests=16,
        speculative_algorithm="draft",
        speculative_draft_model=tiny_model(),
        speculative_num_draft_tokens=DRAFTED,
        speculative_adaptive="off",
        **settings,
    ) as cluster:
        (node,) = cluster.nodes
        drafter: Any = node.node.core.drafter
        runner, launched = drafter._runner, list[int]()
        launch = runner._launch_kernels

        def note(items: Any, *others: Any) -> torch.Tensor:
            launched.append(sum(len(item.token_ids) for item in items))
            return launch(items, *others)

        runner._launch_kernels = note
        asks = [(prompt, params) for params in SAMPLING for prompt in PROMPTS]
        answers = [
            cluster.client.generate(prompt, [node], max_tokens=41, **params).tokens()
            for prompt, params in asks
        ]
        pending = [
            cluster.client.generate(prompt, [node], max_tokens=41, **params)
            for prompt, params in asks
        ]
        answers += [each.tokens() for each in pending]
        drafts = counter(node, "pd_speculative_drafts_total")
        accepted = counter(node, "pd_speculative_accepted_total")
        # A token may be another one where two are nearly as likely.
        assert accepted > 0.98 * drafts * DRAFTED > 0
        kinds = runner.graphs, node.node.engine.runner.graphs
        own, others = ([] if graphs is None else graphs.sizes for graphs in kinds)
        assert own == others
    return answers, launched


@pytest.mark.timeout(300)
def test_passes_of_a_nodes_draft_model_are_graphs() -> None:
    with_graphs, launched = answers_of()
    assert launched == []
    without, launched = answers_of(cuda_graph_batch_sizes=(0,))
    assert len(launched) > 100
    same = sum(a == b for a, b in zip(with_graphs, without, strict=True))
    assert same >= len(without) - 1


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_the_pool_leaves_what_mem_fraction_says_beside_a_draft_model(
    tmp_path: Path, attention: str
) -> None:
    """With a vocabulary of which logits take much, and graphs of many sizes. The GPU has to be free
    of others."""
    gpu = torch.cuda.device_count() - 1
    path = make_checkpoint("llama3", tmp_path, head_dim=128, vocab_size=131_072)
    torch.cuda.empty_cache()
    config = NodeConfig(
        role="decode",
        model=path,
        device=f"cuda:{gpu}",
        dtype="bfloat16",
        mem_fraction=0.5,
        attention_backend=attention,
        max_running_requests=256,
        speculative_algorithm="draft",
        speculative_draft_model=path,
    )
    draft = DraftModel.load(config, path)
    built = Engine.build(config, draft.memory)
    runner = draft.make_runner(built.pool.num_pages)
    free, total = torch.cuda.mem_get_info(gpu)
    promised = 0.5 * total
    print(
        f"promised {promised / MIB:.0f} MiB, free {free / MIB:.0f}; "
        f"graphs of the draft model {draft.lasting_bytes / MIB:.0f}"
    )
    assert abs(free - promised) < 256 * MIB
    assert draft.lasting_bytes > 128 * MIB
    assert runner.graphs is not None
    assert runner.verify_graphs is not None
    assert runner.mixed_graphs is not None
    built.close()
