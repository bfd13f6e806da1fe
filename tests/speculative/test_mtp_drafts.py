"""Drafts of a checkpoint's own layer (MTP): they change no output, and they are those of a plain
loop in transformers, however a node computed them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import is_greedy, reference_generate
from cluster import Cluster, TokenClient, random_prompts, start_node
from counters import counter
from mtp_checkpoints import FAMILIES, are_drafted, make_mtp_checkpoint

from pd.core.errors import PDError
from pd.core.node_info import NO_HEAD
from pd.speculative.choice import describe_drafter
from pd.speculative.eagle import EagleDrafter

if TYPE_CHECKING:
    from pathlib import Path

    from pd.engine.draft_tree import DraftTree
    from pd.scheduling.request import Sequence

TOKENS = 40
CELLS = [(family, kind) for family in FAMILIES for kind in ("unified", "split")]
SAMPLE = {("deepseek_v3", "split"), ("glm4_moe", "unified")}


@dataclass
class Made:
    """A draft after the first ``count`` tokens of a sequence; ``ranks`` of its guesses."""

    sequence: Sequence
    count: int
    tokens: list[int]
    tree: DraftTree
    ranks: tuple[int, ...]

    @property
    def known(self) -> list[int]:
        return self.sequence.ids[: self.count].tolist()

    @property
    def is_needed(self) -> bool:
        """Whether the tokens before it were accepted, and it ends no later than the output:
        guesses after that have no pages."""
        end = len(self.sequence.request.prompt) + TOKENS
        return self.count <= self.sequence.num_tokens and self.count + self.tree.size <= end


class Notes:
    """Notes every draft, and then makes many of them right, because those of random weights never
    are.

    Args:
        sequences: prompts with their answers.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, sequences: list[list[int]], seed: int
    ) -> None:
        self.made: list[Made] = []
        rng, true = random.Random(seed), EagleDrafter._draft_asks

        @torch.inference_mode()
        def note(drafter: EagleDrafter, asks: Any, ends: Any) -> Any:
            drafts = true(drafter, asks, ends)
            positions = ends.positions[list(ends.index)].tolist()
            for ask, position, made in zip(asks, positions, drafts, strict=True):
                if not ask.sequence.request.room:
                    continue
                tokens = made.batch.tokens[made.first : made.first + made.size]
                ranks = drafter._shape.ranks[: made.size]
                count = position + 1
                self.made.append(Made(ask.sequence, count, tokens.tolist(), made.tree, ranks))
                known = ask.sequence.ids[:5].tolist()
                (whole,) = (each for each in sequences if each[:5] == known)
                path = made.tree.paths[rng.randrange(made.size)]
                for guess, token in zip(path, whole[count:], strict=False):
                    tokens[guess] = token
            return drafts

        monkeypatch.setattr(EagleDrafter, "_draft_asks", note)

    def list_drafts(self, prompts: list[list[int]], step: int) -> list[Made]:
        """List the first drafts of each sequence and every ``step``-th other one."""
        true = [each for each in self.made if each.is_needed]
        ends = {len(prompt) + 1 for prompt in prompts}
        first = [each for each in true if each.count in ends]
        assert len(first) >= len(prompts)
        return [*first, *true[::step]]


def check_drafts(model: Path, made: list[Made]) -> None:
    for each in made:
        right = are_drafted(model, each.known, each.tokens, each.tree, each.ranks)
        assert right, f"after {each.count} tokens"


def start_cluster(model: Path, kind: str, **settings: Any) -> Cluster:
    return Cluster(
        model,
        *((1, 1, 0) if kind == "split" else (0, 0, 1)),
        speculative_algorithm="mtp",
        speculative_adaptive="off",
        **{"speculative_num_draft_tokens": 3, "chunked_prefill_size": 24, **settings},
    )


def list_nodes(cluster: Cluster) -> list[Any]:
    return list(cluster.pair) if cluster.prefill else [cluster.unified[0]]


def note_drafts(
    monkeypatch: pytest.MonkeyPatch, model: Path, prompts: list[list[int]], seed: int
) -> Notes:
    answers = reference_generate(model, prompts, TOKENS + 4)
    sequences = [[*each, *answer] for each, answer in zip(prompts, answers, strict=True)]
    return Notes(monkeypatch, sequences, seed)


def check_answers(cluster: Cluster, model: Path, prompts: list[list[int]]) -> int:
    """Compare answers with transformers', and return the number of cached tokens."""
    nodes = list_nodes(cluster)
    sent = [cluster.client.generate(each, nodes, max_tokens=TOKENS) for each in prompts]
    for prompt, request in zip(prompts, sent, strict=True):
        assert is_greedy(model, prompt, request.tokens())
    return sum(request.cached_tokens or 0 for request in sent)


@pytest.mark.parametrize(
    ("family", "kind"),
    [cell if cell in SAMPLE else pytest.param(*cell, marks=pytest.mark.full) for cell in CELLS],
)
def test_drafts_equal_a_plain_loop_with_all_features(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """In chunks, from cached pages, after right and wrong drafts, after a hand-off between unequal
    pages, and after retraction."""
    model = make_mtp_checkpoint(family, tmp_path)
    prompts = list(random_prompts(seed, [30, 33, 40, 45]))
    notes = note_drafts(monkeypatch, model, prompts, seed)
    scarce = {"page_size": 4, "kv_cache_tokens": 164, "reserved_decode_tokens": 1}
    with start_cluster(
        model,
        kind,
        kv_digest=True,
        prefill_settings={"page_size": 16},
        decode_settings=scarce,
        **(scarce if kind == "unified" else {}),
    ) as cluster:
        check_answers(cluster, model, prompts)
        assert check_answers(cluster, model, prompts) > 0
        cluster.wait_idle()
        assert counter(list_nodes(cluster)[-1], "pd_retractions_total") > 0
        assert counter(list_nodes(cluster)[-1], "pd_speculative_accepted_total") > TOKENS
    check_drafts(model, notes.list_drafts(prompts, step=11))


@pytest.mark.parametrize(
    ("family", "ranks", "ranks_of_prefill", "groups"),
    [
        ("deepseek_v3", 2, 1, 1),
        pytest.param("deepseek_v3", 2, 1, 2, marks=pytest.mark.full),
        pytest.param("deepseek_v3", 1, 2, 1, marks=pytest.mark.full),
        pytest.param("glm4_moe", 2, 1, 2, marks=pytest.mark.full),
        pytest.param("glm4_moe", 1, 2, 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_change_no_draft(
    family: str,
    ranks: int,
    ranks_of_prefill: int,
    groups: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Rank 0 has the whole layer, with all experts, and its KV."""
    model = make_mtp_checkpoint(family, tmp_path)
    prompts = list(random_prompts(seed, [9, 31]))
    notes = note_drafts(monkeypatch, model, prompts, seed)
    settings = {"tp_size": ranks, "ep_size": groups}
    prefill = {"tp_size": ranks_of_prefill, "ep_size": 1}
    with start_cluster(model, "split", **settings, prefill_settings=prefill) as cluster:
        check_answers(cluster, model, prompts)
        cluster.wait_idle()
    check_drafts(model, notes.list_drafts(prompts, step=5))


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("glm4_moe", marks=pytest.mark.full)]
)
def test_guesses_of_trees_are_the_likeliest_after_their_branch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model = make_mtp_checkpoint(family, tmp_path)
    prompts = list(random_prompts(seed, [7, 30]))
    notes = note_drafts(monkeypatch, model, prompts, seed)
    tree = {"speculative_num_draft_tokens": 6, "speculative_topk": 2}
    with start_cluster(model, "unified", **tree) as cluster:
        check_answers(cluster, model, prompts)
        cluster.wait_idle()
    made = notes.list_drafts(prompts, step=5)
    assert any(not each.tree.is_chain for each in made)
    check_drafts(model, made)


def test_a_pair_in_which_one_node_does_not_draft_is_refused(tmp_path: Path) -> None:
    """The message names the layer's widths."""
    model = make_mtp_checkpoint("deepseek_v3", tmp_path)
    nodes = [
        start_node("prefill", model),
        start_node("decode", model, speculative_algorithm="mtp"),
        start_node("prefill", model, speculative_algorithm="mtp"),
    ]
    client = TokenClient(nodes)
    without, decode, same = nodes
    drafter = "mtp (1 KV heads of 40, states of 64, float32)"
    try:
        assert describe_drafter(decode.node.core.config, decode.node.engine) == drafter
        with pytest.raises(PDError, match="--speculative-algorithm differs") as raised:
            client.generate([1, 2, 3], [without, decode], max_tokens=4).result()
        assert repr(drafter) in str(raised.value)
        assert repr(NO_HEAD) in str(raised.value)
        client.generate([1, 2, 3], [same, decode], max_tokens=4).result()
    finally:
        client.close()
        for server in nodes:
            server.stop()
