"""Several ranks compute what one does: here as threads of one process, a model each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    VOCAB_SIZE,
    make_checkpoint,
    reference_generate,
    reference_logits,
)
from greedy_engine import generate
from safetensors.torch import load_file, save_file
from threaded_ranks import Rank, Threads, make_runner

from pd.core.errors import UsageError
from pd.engine.draft_tree import DraftTree, make_chain
from pd.engine.forward_item import ForwardItem
from pd.engine.tensor_parallel.messages import ForwardStep
from pd.models import loader
from pd.models.config_reader import read_model_config
from pd.models.tensor_parallel import SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Checkpoint = Callable[[str], Path]

NEW_TOKENS = 12
WITH_EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
)


def random_prompts(lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


def check_parity(path: Path, size: int, ep_size: int = 1) -> None:
    prompts = random_prompts([1, 17, 40, 150])
    expected = reference_generate(path, prompts, NEW_TOKENS)

    def work(rank: Rank) -> Any:
        runner = make_runner(path, rank, ep_size=ep_size)
        return generate(runner, prompts, NEW_TOKENS, max_chunk=50, seed=0)

    for sequences in Threads(size).run(work):
        assert [s.output for s in sequences] == expected
        for prompt, sequence in zip(prompts, sequences, strict=True):
            logits = reference_logits(path, prompt + sequence.output[:-1])[len(prompt) - 1 :]
            torch.testing.assert_close(torch.stack(sequence.logits), logits, atol=2e-4, rtol=0)


class TestParity:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_two_ranks_equal_transformers(self, checkpoint: Checkpoint, architecture: str) -> None:
        check_parity(checkpoint(architecture), 2)

    @pytest.mark.parametrize(
        "architecture",
        [
            "qwen3_moe",
            *(pytest.param(a, marks=pytest.mark.full) for a in ("llama2", "qwen2", "qwen3")),
        ],
    )
    def test_four_ranks_equal_transformers(self, architecture: str, tmp_path: Path) -> None:
        bias = {"attention_bias": True} if architecture != "qwen2" else {}
        path = make_checkpoint(architecture, tmp_path, num_key_value_heads=4, **bias)
        check_parity(path, 4)

    @pytest.mark.parametrize(
        ("architecture", "kv_heads", "size"),
        [
            ("gpt_oss", 2, 4),
            ("qwen2", 1, 2),
            pytest.param("phi3", 2, 4, marks=pytest.mark.full),
            pytest.param("glm4_moe", 1, 4, marks=pytest.mark.full),
            pytest.param("qwen3_moe", 2, 4, marks=pytest.mark.full),
        ],
    )
    def test_more_ranks_than_kv_heads(
        self, architecture: str, kv_heads: int, size: int, tmp_path: Path
    ) -> None:
        path = make_checkpoint(architecture, tmp_path, num_key_value_heads=kv_heads)
        assert read_model_config(path).split_by_ranks(size).kv_replicas == size // kv_heads
        check_parity(path, size)

    def test_kv_heads_that_ranks_can_neither_divide_nor_share_are_refused(
        self, tmp_path: Path
    ) -> None:
        path = make_checkpoint(
            "qwen2", tmp_path, num_attention_heads=12, hidden_size=96, num_key_value_heads=4
        )
        with pytest.raises(UsageError, match=r"--tp-size 6 does not divide .* num_kv_heads 4"):
            read_model_config(path).split_by_ranks(6)


class TestExpertParallel:
    """Ranks that have different experts. The tests above have a part of every expert."""

    @pytest.mark.parametrize("architecture", WITH_EXPERTS)
    def test_two_ranks_equal_transformers(self, checkpoint: Checkpoint, architecture: str) -> None:
        check_parity(checkpoint(architecture), 2, ep_size=2)

    @pytest.mark.parametrize(
        ("architecture", "ep_size"),
        [
            ("gpt_oss", 2),
            ("deepseek_v3", 4),
            *(pytest.param(a, 2, marks=pytest.mark.full) for a in WITH_EXPERTS if a != "gpt_oss"),
            *(pytest.param(a, 4, marks=pytest.mark.full) for a in ("mixtral", "gpt_oss")),
        ],
    )
    def test_four_ranks_equal_transformers(
        self, architecture: str, ep_size: int, tmp_path: Path
    ) -> None:
        """With two groups, the two ranks of each divide its experts."""
        path = make_checkpoint(architecture, tmp_path)
        part = read_model_config(path).split_by_ranks(4, ep_size)
        whole = read_model_config(path)
        assert part.num_local_experts * ep_size == part.num_experts == whole.num_experts
        assert part.intermediate_size == whole.intermediate_size // (4 // ep_size)
        check_parity(path, 4, ep_size)

    @pytest.mark.parametrize(
        ("architecture", "settings", "size", "ep_size", "message"),
        [
            ("llama3", {}, 2, 2, "--ep-size 2: llama has no experts to divide"),
            ("mixtral", {}, 2, 4, "--ep-size 4 does not divide --tp-size 2"),
            ("mixtral", {}, 1, 2, "--ep-size 2 does not divide --tp-size 1"),
            (
                "mixtral",
                {"num_local_experts": 6},
                4,
                4,
                "--ep-size 4 does not divide the model's num_experts 6",
            ),
            (
                "mixtral",
                {"intermediate_size": 95},
                4,
                2,
                "--tp-size 4 / --ep-size 2 does not divide the model's intermediate_size 95",
            ),
            (
                "deepseek_v3",
                {"moe_intermediate_size": 47},
                2,
                2,
                "--tp-size 2 does not divide the width of the model's shared experts 47",
            ),
        ],
    )
    def test_groups_that_cannot_be_made_are_refused(
        self,
        architecture: str,
        settings: dict[str, int],
        size: int,
        ep_size: int,
        message: str,
        tmp_path: Path,
    ) -> None:
        config = read_model_config(make_checkpoint(architecture, tmp_path, **settings))
        with pytest.raises(UsageError, match=f"^{message}$"):
            config.split_by_ranks(size, ep_size)

    def test_whole_experts_may_have_a_width_that_ranks_cannot_divide(self, tmp_path: Path) -> None:
        """Compared with a single rank, because transformers needs a multiple of 4."""
        path = make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=33)
        prompts = random_prompts([1, 40])

        def work(rank: Rank) -> list[list[int]]:
            runner = make_runner(path, rank, ep_size=rank.size)
            return [s.output for s in generate(runner, prompts, NEW_TOKENS, max_chunk=50, seed=0)]

        one, two = Threads(1).run(work), Threads(2).run(work)
        assert two == one * 2

    @pytest.mark.parametrize(("size", "ep_size"), [(2, 2), (4, 2)])
    @pytest.mark.parametrize("load_format", ["auto", "dummy"])
    @pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3", "gpt_oss"])
    def test_ranks_have_the_weights_of_their_experts(
        self,
        checkpoint: Checkpoint,
        architecture: str,
        load_format: str,
        size: int,
        ep_size: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Put together, the parts are the tensors that a single rank has, each number once."""
        monkeypatch.setattr("pd.models.causal_lm.CausalLM.prepare_weights", lambda model: None)
        monkeypatch.setattr("pd.models.loader._DUMMY_BLOCK", 997)
        path = checkpoint(architecture)
        settings: Any = {"load_format": load_format}
        whole = dict(make_runner(path, SINGLE, **settings).model.list_tensors())
        times = {name: torch.zeros_like(place.memory) for name, place in whole.items()}
        for rank in range(size):
            tp = Rank(Threads(size), rank)
            for name, place in make_runner(
                path, tp, ep_size=ep_size, **settings
            ).model.list_tensors():
                part = place.slice_part(tp)
                assert torch.equal(place.memory, whole[name].memory[part]), name
                times[name][part] += 1
        found = {name for name in whole if ".experts." in name}
        assert found
        for name in found:
            copies = size // ep_size if name.endswith("down_proj_bias") else 1
            assert bool((times[name] == copies).all()), name

    def test_a_rank_reads_only_its_experts(
        self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read: list[str] = []

        def copy(stored: Any, place: Any, tp: Any, name: str, *rest: Any) -> None:
            read.append(name)
            copy_tensor(stored, place, tp, name, *rest)

        copy_tensor = loader._copy_tensor
        monkeypatch.setattr(loader, "_copy_tensor", copy)
        for rank in range(2):
            read.clear()
            make_runner(checkpoint("mixtral"), Rank(Threads(2), rank), ep_size=2)
            experts = {name.split(".experts.")[1][0] for name in read if ".experts." in name}
            assert experts == ({"0", "1"}, {"2", "3"})[rank]

    @pytest.mark.parametrize("name", ["experts.4.w1.weight", "experts.3.w1.bias"])
    def test_tensors_that_no_rank_has_are_refused(self, name: str, tmp_path: Path) -> None:
        path = make_checkpoint("mixtral", tmp_path)
        extra = f"model.layers.0.block_sparse_moe.{name}"
        save_file(
            load_file(path / "model.safetensors") | {extra: torch.zeros(4)},
            path / "model.safetensors",
            {"format": "pt"},
        )
        with pytest.raises(UsageError, match=f"holds tensor {extra}, which the model lacks"):
            make_runner(path, Rank(Threads(2), 0), ep_size=2)


class TestWeights:
    @pytest.mark.parametrize("load_format", ["auto", "dummy"])
    @pytest.mark.parametrize(
        "architecture",
        [
            "llama2",
            "llama3",
            "mixtral",
            "qwen3_moe",
            "deepseek_v2",
            "deepseek_v3",
            "gpt_oss",
            "phi3",
        ],
    )
    def test_ranks_divide_the_same_weights(
        self,
        checkpoint: Checkpoint,
        architecture: str,
        load_format: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Put together, the parts are the tensors that a single rank has."""
        monkeypatch.setattr("pd.models.causal_lm.CausalLM.prepare_weights", lambda model: None)
        # Small, so that parts begin anywhere in a block, and end in others.
        monkeypatch.setattr("pd.models.loader._DUMMY_BLOCK", 997)
        path = checkpoint(architecture)
        settings: Any = {"load_format": load_format}
        whole = dict(make_runner(path, SINGLE, **settings).model.list_tensors())
        parts = [
            dict(make_runner(path, Rank(Threads(2), rank), **settings).model.list_tensors())
            for rank in range(2)
        ]
        for name, place in whole.items():
            one, two = parts[0][name], parts[1][name]
            if one.split is None:
                assert torch.equal(one.memory, place.memory), name
                assert torch.equal(two.memory, place.memory), name
            else:
                assert one.memory.shape[one.split] * 2 == place.memory.shape[one.split], name
                together = torch.cat((one.memory, two.memory), dim=one.split)
                assert torch.equal(together, place.memory), name

    def test_a_misshaped_tensor_is_named_with_the_whole_shape(
        self, checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        path = checkpoint("llama2")
        config = path / "config.json"
        spoiled = config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 48')
        for file in path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        (tmp_path / "config.json").write_text(spoiled)
        with pytest.raises(UsageError, match=r"\[64, 96\], config.json makes it \[64, 48\]"):
            make_runner(tmp_path, Rank(Threads(2), 0))

    @pytest.mark.parametrize(
        ("size", "what"),
        [(3, "num_heads 4"), (8, "num_heads 4")],
    )
    def test_what_cannot_be_divided_is_refused(
        self, checkpoint: Checkpoint, size: int, what: str
    ) -> None:
        config = read_model_config(checkpoint("llama3"))
        with pytest.raises(UsageError, match=f"--tp-size {size} does not divide .* {what}"):
            config.split_by_ranks(size)


def test_a_step_arrives_as_it_was_sent() -> None:
    def array(*values: int) -> Any:
        return np.array(values, np.int32)

    items = [
        ForwardItem(array(5, 6, 7), 30, array(9, 4, 3, 8), 2),
        ForwardItem(array(-1), 0, array(1), 1),
        ForwardItem(array(4, 4), 14, array(2, 6), 0),
    ]
    step = ForwardStep.pack_items(items, 16, 7)
    assert step.num_previous == 7
    received = step.unpack_items()
    # Of the first table, the last page is not touched by this step.
    tables = [[9, 4, 3], [1], [2]]
    for sent, got, table in zip(items, received, tables, strict=True):
        assert got.token_ids.tolist() == sent.token_ids.tolist()
        assert (got.start, got.num_logits) == (sent.start, sent.num_logits)
        assert got.pages.tolist() == table
        assert got.pages.dtype == got.token_ids.dtype == np.int32


def test_trees_and_what_is_computed_again_arrive_with_their_items() -> None:
    """Items without a tree stand between those with one, so that each finds its own guesses."""
    branches = [-1, 0, 0, 1, -1]
    trees = [None, make_chain(2), DraftTree(np.array(branches, np.int32)), None, make_chain(1)]
    reread = [True, False, True, False, False]
    items = []
    for number, (tree, again) in enumerate(zip(trees, reread, strict=True)):
        size = 1 + again + (0 if tree is None else tree.size)
        ids = np.arange(100 * number, 100 * number + size, dtype=np.int32)
        item = ForwardItem(ids, 20 - again, np.arange(2, dtype=np.int32), 1, tree, again)
        item.carried = 7  # a matter of rank 0
        items.append(item)
    received = ForwardStep.pack_items(items, 16, 0).unpack_items()
    assert [item.reread for item in received] == reread
    assert [item.token_ids.tolist() for item in received] == [i.token_ids.tolist() for i in items]
    parents = [None if item.tree is None else item.tree.parents.tolist() for item in received]
    assert parents == [None, [-1, 0], branches, None, [-1]]
    chains = [None if item.tree is None else item.tree.is_chain for item in received]
    assert chains == [None, True, False, None, True]
    seen = received[2].tree
    assert seen is not None and trees[2] is not None
    assert np.array_equal(seen.attention_mask, trees[2].attention_mask)
