"""Drafts of a checkpoint's own layer (MTP): they change no output, and they are those of a plain
loop in transformers, however a node computed them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import is_greedy, reference_generate
from cluster import Cluster, random_prompts
from counters import counter
from mtp_checkpoints import FAMILIES, is_drafted, make_mtp_checkpoint

from pd.speculative.eagle import EagleDrafter

if TYPE_CHECKING:
    from pathlib import Path

    from pd.scheduling.request import Sequence

DRAFTED, TOKENS = 3, 40
CELLS = [(family, kind) for family in FAMILIES for kind in ("unified", "split")]
SAMPLE = {("deepseek_v3", "split"), ("glm4_moe", "unified")}


class Notes:
    """Notes every draft, and then makes many of them right, because those of random weights never
    are.

    Args:
        sequences: prompts with their answers.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, sequences: list[list[int]], seed: int
    ) -> None:
        self.made: list[tuple[Sequence, int, list[int]]] = []
        rng, true = random.Random(seed), EagleDrafter._draft_asks

        @torch.inference_mode()
        def note(drafter: EagleDrafter, asks: Any, ends: Any) -> Any:
            drafts = true(drafter, asks, ends)
            positions = ends.positions[list(ends.index)].tolist()
            for ask, position, made in zip(asks, positions, drafts, strict=True):
                if not ask.sequence.request.room:
                    continue
                tokens = made.batch.tokens[made.first : made.first + made.size]
                self.made.append((ask.sequence, position + 1, tokens.tolist()))
                known = ask.sequence.ids[:5].tolist()
                (whole,) = (each for each in sequences if each[:5] == known)
                right = torch.tensor(whole[position + 1 :][: rng.randrange(made.size + 1)])
                tokens[: len(right)] = right
            return drafts

        monkeypatch.setattr(EagleDrafter, "_draft_asks", note)

    def list_drafts(self) -> list[tuple[list[int], list[int]]]:
        """List the drafts with the tokens before them, if those were accepted."""
        return [
            (sequence.ids[:count].tolist(), drafts)
            for sequence, count, drafts in self.made
            if count <= sequence.num_tokens
        ]


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
    answers = reference_generate(model, prompts, TOKENS + DRAFTED)
    sequences = [[*each, *answer] for each, answer in zip(prompts, answers, strict=True)]
    notes = Notes(monkeypatch, sequences, seed)
    scarce = {"page_size": 4, "kv_cache_tokens": 196, "reserved_decode_tokens": 1}
    with Cluster(
        model,
        *((1, 1, 0) if kind == "split" else (0, 0, 1)),
        chunked_prefill_size=24,
        kv_digest=True,
        speculative_algorithm="mtp",
        speculative_num_draft_tokens=DRAFTED,
        speculative_adaptive="off",
        prefill_settings={"page_size": 16},
        decode_settings=scarce,
        **(scarce if kind == "unified" else {}),
    ) as cluster:
        nodes = list(cluster.pair) if kind == "split" else [cluster.unified[0]]
        for turn in range(2):
            sent = [cluster.client.generate(each, nodes, max_tokens=TOKENS) for each in prompts]
            for prompt, request in zip(prompts, sent, strict=True):
                assert is_greedy(model, prompt, request.tokens())
            assert turn == 0 or sum(request.cached_tokens or 0 for request in sent) > 0
        cluster.wait_idle()
        assert counter(nodes[-1], "pd_retractions_total") > 0
        assert counter(nodes[-1], "pd_speculative_accepted_total") > TOKENS
    drafts = notes.list_drafts()
    ends = {len(prompt) + 1 for prompt in prompts}
    first = [each for each in drafts if len(each[0]) in ends]
    assert len(first) >= 2 * len(prompts)
    for known, drafted in [*first, *drafts[::11]]:
        assert is_drafted(model, known, drafted), f"after {len(known)} tokens"
