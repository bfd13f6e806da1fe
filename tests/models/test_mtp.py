"""A checkpoint's own layer for drafts (MTP): its logits equal transformers', draft by draft."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, reference_model
from fp8_checkpoints import inputs_rounded, make_fp8_checkpoint
from mtp_checkpoints import (
    FAMILIES,
    make_mtp_checkpoint,
    reference_draft_logits,
    reference_mtp,
)
from safetensors.torch import load_file, save_file

from pd.core.errors import UsageError
from pd.core.node_info import KVLayout
from pd.engine.eagle import EagleWriter, make_head_plane
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.kernels.attention import find_attention_backend
from pd.models.config_reader import read_model_config
from pd.models.latent_attention import find_latent_shape
from pd.models.loader import load_model
from pd.models.mtp import MtpHead, check_mtp_tensors, load_mtp_head
from pd.models.mtp_config import MtpConfig
from pd.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.models.causal_lm import CausalLM

    MtpCheckpoint = Callable[[str], Path]

PAGE = 4


@pytest.fixture(scope="module")
def mtp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MtpCheckpoint:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[architecture] = make_mtp_checkpoint(architecture, directory)
        return made[architecture]

    return make


def load(path: Path, **settings: Any) -> tuple[CausalLM, MtpHead]:
    config = read_model_config(path)
    settings = {"progress": False, **settings}
    model = load_model(path, config, dtype=torch.float32, device="cpu", **settings)
    head = load_mtp_head(path, MtpConfig.of_target(path, config), model, **settings)
    model.aux_layers, model.aux_normed = head.config.aux_layers, head.config.normed
    return model, head


class FirstOfTwo(TensorParallel):
    rank, size = 0, 2


class Drafting:
    """A model and its layer over a pool of their own."""

    def __init__(self, model: CausalLM, head: MtpHead, *, max_chunk: int = 1000) -> None:
        planes = model.config.make_plane("float32"), make_head_plane(head.config, "float32")
        self.pool = KVPool(KVLayout(planes, PAGE), 40, "cpu")
        self.writer = EagleWriter(head, model, self.pool.view_plane("mtp"), 3)
        self.kind = find_attention_backend("torch", torch.device("cpu"), torch.float32, 8)
        self.runner = ModelRunner.build(
            model, self.pool, self.kind, prompts=False, eagle=self.writer
        )
        self.pages = np.random.default_rng(0).permutation(40).astype(np.int32)
        self.max_chunk = max_chunk

    @torch.inference_mode()
    def compute_logits(self, known: list[int], drafts: list[int]) -> torch.Tensor:
        """What :func:`mtp_checkpoints.reference_draft_logits` computes."""
        ids, state = np.array(known, np.int32), 2
        for start in range(0, len(ids) - 1, self.max_chunk):
            chunk = ids[start : min(start + self.max_chunk, len(ids) - 1)]
            self.runner.forward([ForwardItem(chunk, start, self.pages, carried=state)])
            self.writer.keep_states(*numbers([state], [len(chunk) - 1], [-1]))
        head, layer = self.writer.head, self.writer.head.config.layer
        backend = self.kind(self.writer.kv, layer.num_heads, find_latent_shape(layer))
        attention = backend.make_draft_graph(1, 160, head.first_key)
        assert attention is not None
        attention.plan(np.array([len(known) + len(drafts)]), [self.pages])
        hidden, found = self.writer.carried[state:], []
        for place, token in enumerate([known[-1], *drafts], len(known) - 1):
            attention.places[0], attention.bases[0] = place, place + 1
            attention.locate_slots()
            logits, hidden = head(*numbers([token]), hidden, *numbers([place]), attention)
            found.append(logits[0])
        return torch.stack(found)


def numbers(*columns: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.int64) for column in columns]


def check_logits(drafting: Drafting, path: Path, seed: int, lengths: tuple[int, ...]) -> None:
    random = np.random.default_rng(seed)
    for length in lengths:
        known = random.integers(0, VOCAB_SIZE, length).tolist()
        drafts = random.integers(0, VOCAB_SIZE, 3).tolist()
        expected = reference_draft_logits(path, known, drafts)
        found = drafting.compute_logits(known, drafts)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_draft_logits_equal_transformers(
    mtp_checkpoint: MtpCheckpoint, architecture: str, seed: int
) -> None:
    """Of the first draft and of further ones, after prompts computed in one pass."""
    path = mtp_checkpoint(architecture)
    check_logits(Drafting(*load(path)), path, seed, (2, 3, 21, 70))


def test_ranks_that_divide_the_output_head_read_it_once_more(
    mtp_checkpoint: MtpCheckpoint, seed: int
) -> None:
    path = mtp_checkpoint("deepseek_v3")
    model, _ = load(path)
    config = read_model_config(path)
    settings: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "progress": False}
    part = load_model(path, config, tp=FirstOfTwo(), **settings)
    assert len(part.head) == VOCAB_SIZE // 2
    head = load_mtp_head(path, MtpConfig.of_target(path, config), part, progress=False)
    check_logits(Drafting(model, head), path, seed, (9,))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_draft_logits_do_not_depend_on_chunks(
    mtp_checkpoint: MtpCheckpoint, architecture: str, seed: int
) -> None:
    path = mtp_checkpoint(architecture)
    check_logits(Drafting(*load(path), max_chunk=5), path, seed, (7, 33))


@pytest.mark.parametrize("plain", [(), ("3.eh_proj", "3.self_attn.o_proj")])
def test_a_layer_in_fp8_computes_with_rounded_inputs(
    plain: tuple[str, ...], tmp_path: Path, seed: int
) -> None:
    """``eh_proj`` of DeepSeek's checkpoint is not in fp8.

    Sums in another order differ by 1e-7, and a rounding between two numbers makes some of these
    differences a million times larger, in ever more logits of a chain. Without such a rounding
    they stay small, and with wrong weights they never are.
    """
    fp8, meant = make_fp8_checkpoint("deepseek_v3", "block", tmp_path, plain, make_mtp_checkpoint)
    drafting, errors = Drafting(*load(fp8)), []
    random = np.random.default_rng(seed)
    own = tuple(name.replace("3.self_attn", "0.mtp_block.self_attn") for name in plain)
    own = tuple(name.replace("3.eh", "eh") for name in own)
    rounded = inputs_rounded(reference_mtp(meant), "block", plain_modules=own)
    with inputs_rounded(reference_model(meant), "block"), rounded:
        for length in (2, 3, 3, 4, 5, 6, 8, 12):
            known = random.integers(0, VOCAB_SIZE, length).tolist()
            drafts = random.integers(0, VOCAB_SIZE, 2).tolist()
            expected = reference_draft_logits(meant, known, drafts)
            found = drafting.compute_logits(known, drafts)
            errors += ((found - expected).norm(dim=1) / expected.norm(dim=1)).tolist()
    errors.sort()
    assert errors[len(errors) // 4] < 1e-5, f"{errors}, seed {seed}"


def test_of_several_layers_the_first_drafts(
    mtp_checkpoint: MtpCheckpoint, tmp_path: Path, seed: int
) -> None:
    path = mtp_checkpoint("deepseek_v3")
    tensors = load_file(path / "model.safetensors")
    second = {
        name.replace("layers.3.", "layers.4."): torch.zeros_like(tensor)
        for name, tensor in tensors.items()
        if "layers.3." in name
    }
    copy = write(tmp_path, path, {**tensors, **second}, num_nextn_predict_layers=2)
    check_logits(Drafting(*load(copy)), path, seed, (9,))


class TestRefusals:
    def test_a_model_without_the_layer_is_refused(
        self, mtp_checkpoint: MtpCheckpoint, tmp_path: Path
    ) -> None:
        path = write(tmp_path, mtp_checkpoint("deepseek_v3"), {}, num_nextn_predict_layers=0)
        with pytest.raises(
            UsageError, match=r"--speculative-algorithm mtp: .* no layer for drafts"
        ):
            MtpConfig.of_target(path, read_model_config(path))

    def test_a_checkpoint_without_the_tensors_is_refused(
        self, mtp_checkpoint: MtpCheckpoint, tmp_path: Path
    ) -> None:
        """transformers does not write them, and ``config.json`` promises them by default."""
        model = mtp_checkpoint("deepseek_v3")
        tensors = load_file(model / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if "layers.3." not in name}
        path = write(tmp_path, model, kept)
        config = MtpConfig.of_target(path, read_model_config(path))
        wanted = "--speculative-algorithm mtp: .* lacks tensor model.layers.3.eh_proj.weight"
        with pytest.raises(UsageError, match=wanted):
            check_mtp_tensors(path, config)
        check_mtp_tensors(model, config)

    @pytest.mark.parametrize(
        ("name", "shape", "named"),
        [
            ("model.layers.3.hnorm.weight", None, "lacks tensor model.layers.3.hnorm.weight"),
            (
                "model.layers.3.enorm.weight",
                (63,),
                r"enorm.weight is \[63\], config.json .* \[64\]",
            ),
            ("model.layers.3.fnorm.weight", (64,), "fnorm.weight, which the model lacks"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named(
        self,
        mtp_checkpoint: MtpCheckpoint,
        tmp_path: Path,
        name: str,
        shape: tuple[int, ...] | None,
        named: str,
    ) -> None:
        model = mtp_checkpoint("deepseek_v3")
        tensors = load_file(model / "model.safetensors")
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
        with pytest.raises(UsageError, match=f"--speculative-algorithm mtp: .*{named}"):
            load(write(tmp_path, model, tensors))


def write(directory: Path, model: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    """Write a checkpoint like ``model`` with these tensors and other settings."""
    config = json.loads((model / "config.json").read_text()) | settings
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
