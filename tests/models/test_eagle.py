"""EAGLE heads against their definition in plain torch, on checkpoints in the published layouts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from torch.nn import functional

from pd.bench.shapes import model_directory
from pd.core.errors import UsageError
from pd.core.node_info import KVLayout
from pd.engine.kv_pool import KVPool
from pd.kernels.attention import AttentionBatch, make_attention_backend
from pd.kernels.draft_tensors import States
from pd.kernels.paging import find_token_slots
from pd.models.config_reader import read_model_config
from pd.models.eagle import EagleHead, load_eagle_head
from pd.models.eagle_config import EagleConfig
from pd.models.loader import load_model
from pd.models.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pd.models.causal_lm import CausalLM

    Checkpoint = Callable[[str], Path]
    Tensors = dict[str, torch.Tensor]

VOCAB, DRAFT, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 320, 96, 64, 4, 2, 24, 80
EPS, THETA = 1e-5, 5000.0
PAGE = 4
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
}
EAGLE1 = {**BASE, "architectures": ["LlamaForCausalLMEagle"]}
EAGLE3 = {
    **BASE,
    "draft_vocab_size": DRAFT,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}


@pytest.fixture(scope="module")
def target_path(checkpoint: Checkpoint) -> Path:
    """Three layers, an output head of its own."""
    return checkpoint("llama2")


@pytest.fixture(scope="module")
def target(target_path: Path) -> CausalLM:
    return load_target(target_path)


def load_target(path: Path) -> CausalLM:
    config = read_model_config(path)
    return load_model(path, config, dtype=torch.float32, device="cpu", progress=False)


def layer_tensors(width: int, prefix: str) -> Tensors:
    """Random weights of the decoder layer; attention reads ``width``."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{prefix}{name}.weight": weight(*shape) for name, shape in shapes.items()}


def weight(*shape: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.rand(shape) + 0.5
    return torch.randn(shape) * 1.5 * shape[-1] ** -0.5


def eagle1_tensors() -> Tensors:
    torch.manual_seed(1)
    return {"fc.weight": weight(HIDDEN, 2 * HIDDEN), **layer_tensors(HIDDEN, "layers.0.")}


def eagle3_tensors(prefix: str = "midlayer.") -> Tensors:
    torch.manual_seed(3)
    chosen = torch.randperm(VOCAB)[:DRAFT].sort().values
    return {
        "fc.weight": weight(HIDDEN, 3 * HIDDEN),
        **layer_tensors(2 * HIDDEN, prefix),
        f"{prefix}input_layernorm.weight": weight(HIDDEN),
        f"{prefix}hidden_norm.weight": weight(HIDDEN),
        "norm.weight": weight(HIDDEN),
        "lm_head.weight": weight(DRAFT, HIDDEN),
        "d2t": chosen - torch.arange(DRAFT),
        "t2d": torch.isin(torch.arange(VOCAB), chosen),
    }


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def load(path: Path, target: CausalLM, **settings: Any) -> EagleHead:
    config = EagleConfig.from_pretrained(path, target.config)
    settings = {"dtype": torch.float32, "device": "cpu", "progress": False, **settings}
    return load_eagle_head(path, config, target, **settings)


class Reference:
    """A head as its authors define it: dense causal attention over all pairs of a sequence.

    Args:
        embedding, head: of the target; used where ``tensors`` has none.
    """

    def __init__(
        self,
        tensors: Tensors,
        embedding: torch.Tensor,
        head: torch.Tensor,
        *,
        norm_before_residual: bool = False,
        qk_norm: bool = False,
    ) -> None:
        self.t = {
            name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
            for name, tensor in tensors.items()
        }
        self.embedding = self.t.get("embed_tokens.weight", embedding)
        self.head = self.t.get("lm_head.weight", head)
        self.is_eagle3 = "norm.weight" in self.t
        self.norm_before_residual, self.qk_norm = norm_before_residual, qk_norm

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.t[f"{name}.weight"], EPS)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features, "fc") if self.is_eagle3 else features

    def __call__(
        self, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = functional.embedding(tokens, self.embedding)
        if self.is_eagle3:
            normed = self.norm(fused, "layers.0.hidden_norm")
            x = torch.cat((self.norm(embedded, "layers.0.input_layernorm"), normed), -1)
            residual = normed if self.norm_before_residual else fused
        else:
            x = residual = self.linear(torch.cat((embedded, fused), -1), "fc")
        hidden = residual + self.attend(x, positions)
        normed = self.norm(hidden, "layers.0.post_attention_layernorm")
        gate = functional.silu(self.linear(normed, "layers.0.mlp.gate_proj"))
        up = self.linear(normed, "layers.0.mlp.up_proj")
        hidden = hidden + self.linear(gate * up, "layers.0.mlp.down_proj")
        out = self.norm(hidden, "norm") if self.is_eagle3 else hidden
        return functional.linear(out, self.head), hidden

    def attend(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.linear(x, f"layers.0.self_attn.{name}_proj").view(len(x), -1, HEAD_DIM)
            for name in "qkv"
        )
        if self.qk_norm:
            q = self.norm(q, "layers.0.self_attn.q_norm")
            k = self.norm(k, "layers.0.self_attn.k_norm")
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(positions[:, None] < positions, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self.linear(mixed.flatten(1), "layers.0.self_attn.o_proj")

    @staticmethod
    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = (positions[:, None] * frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Paged:
    """A head over a pool of its own, with one sequence in scattered pages."""

    def __init__(self, head: EagleHead, pages: int = 8) -> None:
        config = head.config.layer
        layout = KVLayout.of_model(1, config.num_kv_heads, config.head_dim, "float32", PAGE)
        self.head, self.pool = head, KVPool(layout, pages, "cpu")
        self.attention = make_attention_backend("auto", self.pool, config.num_heads)
        self.pages = np.random.default_rng(0).permutation(pages).astype(np.int32)

    def forward(
        self, tokens: torch.Tensor, fused: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs from position ``start`` on; K and V of those before are in the pool."""
        count = len(tokens)
        batch = AttentionBatch(np.array([start]), np.array([count]), [self.pages])
        self.attention.plan(batch)
        positions = torch.arange(start, start + count)
        return self.head(tokens, fused, positions, self.attention)

    def write_kv(self, tokens: torch.Tensor, fused: torch.Tensor, start: int) -> None:
        positions = np.arange(start, start + len(tokens))
        slots = torch.from_numpy(find_token_slots(self.pages, positions, PAGE)).long()
        place = torch.from_numpy(positions)
        self.head.write_kv(tokens, States.from_rows(fused), place, self.pool, slots)


def check(head: EagleHead, reference: Reference, count: int = 14) -> None:
    """All pairs at once, K and V alone before a draft, and a second draft from the first give what
    the reference computes from all pairs."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (count,))
    features = torch.randn(count, head.config.feature_size)
    fused = head.fuse_features(features)
    torch.testing.assert_close(fused, reference.fuse(features))
    kept = fused.clone()
    positions = torch.arange(count)
    logits, hidden = reference(tokens, fused, positions)

    paged = Paged(head)
    found = paged.forward(tokens, fused, 0)
    torch.testing.assert_close(found, (logits, hidden), rtol=1e-4, atol=1e-4)
    whole = paged.pool.planes[0].buffer.clone()

    paged = Paged(head)
    paged.write_kv(tokens[:-1], fused[:-1], 0)
    one, own = paged.forward(tokens[-1:], fused[-1:], count - 1)
    torch.testing.assert_close((one, own), (logits[-1:], hidden[-1:]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(paged.pool.planes[0].buffer, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(fused, kept), "the caller's fused hidden states were changed"

    drafted = one.argmax(-1)
    drafted = drafted if head.target_ids is None else head.target_ids[drafted]
    found = paged.forward(drafted, own, count)
    logits, hidden = reference(
        torch.cat((tokens, drafted)), torch.cat((fused, own)), torch.arange(count + 1)
    )
    torch.testing.assert_close(found, (logits[-1:], hidden[-1:]), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def theirs(target_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and output head."""
    stored = load_file(target_path / "model.safetensors")
    return stored["model.embed_tokens.weight"], stored["lm_head.weight"]


Theirs = tuple[torch.Tensor, torch.Tensor]


class TestEagle1:
    def test_embedding_and_output_head_are_the_targets(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle1_tensors()
        head = load(write(tmp_path, EAGLE1, tensors), target)
        assert head.embedding.data_ptr() == target.embedding.data_ptr()
        assert head.target_ids is None
        assert sum(p.numel() for p in head.parameters()) == sum(map(torch.numel, tensors.values()))
        check(head, Reference(tensors, *theirs))

    def test_bias_of_fc_and_an_output_head_of_its_own(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle1_tensors()
        tensors["fc.bias"] = torch.randn(HIDDEN)
        tensors["lm_head.weight"] = weight(VOCAB, HIDDEN)
        check(load(write(tmp_path, EAGLE1, tensors), target), Reference(tensors, *theirs))

    def test_a_target_with_one_matrix_for_both(
        self, checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        target = load_target(checkpoint("qwen2"))
        embedding = target.embedding
        tensors = eagle1_tensors()
        head = load(write(tmp_path, EAGLE1, tensors), target)
        assert head.head.data_ptr() == embedding.data_ptr()
        check(head, Reference(tensors, embedding, embedding))

    def test_qwen2_has_biases_at_q_k_and_v(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle1_tensors()
        for name in ("q", "k", "v"):
            key = f"layers.0.self_attn.{name}_proj"
            tensors[f"{key}.bias"] = torch.randn(len(tensors[f"{key}.weight"]))
        config = {**EAGLE1, "architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
        check(load(write(tmp_path, config, tensors), target), Reference(tensors, *theirs))

    def test_features_are_the_last_hidden_state_after_the_norm(self, target: CausalLM) -> None:
        config = EagleConfig.from_dict(EAGLE1, target.config)
        assert (config.algorithm, config.aux_layers, config.normed) == ("eagle", (3,), True)
        assert config.feature_size == config.hidden_size == HIDDEN


class TestEagle3:
    @pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.midlayer."])
    def test_reduced_vocabulary(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path, prefix: str
    ) -> None:
        tensors = eagle3_tensors(prefix)
        head = load(write(tmp_path, EAGLE3, tensors), target)
        assert head.target_ids is not None
        assert head.target_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()
        assert head.embedding.data_ptr() == target.embedding.data_ptr()
        check(head, Reference(tensors, *theirs))

    def test_the_residual_stream_starts_normalized(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors()
        head = load(write(tmp_path, {**EAGLE3, "norm_before_residual": True}, tensors), target)
        check(head, Reference(tensors, *theirs, norm_before_residual=True))

    def test_norms_of_q_and_k(self, target: CausalLM, theirs: Theirs, tmp_path: Path) -> None:
        tensors = eagle3_tensors()
        for name in ("q_norm", "k_norm"):
            tensors[f"midlayer.self_attn.{name}.weight"] = weight(HEAD_DIM)
        config = {**EAGLE3, "architectures": ["Qwen3ForCausalLMEagle3"], "model_type": "qwen3"}
        head = load(write(tmp_path, config, tensors), target)
        check(head, Reference(tensors, *theirs, qk_norm=True))

    def test_all_tokens_and_the_targets_output_head(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors()
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
        head = load(write(tmp_path, {**EAGLE3, "draft_vocab_size": None}, tensors), target)
        assert head.target_ids is None
        check(head, Reference(tensors, *theirs))

    def test_all_tokens_and_an_output_head_of_its_own(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors()
        tensors |= {"lm_head.weight": weight(VOCAB, HIDDEN), "d2t": torch.zeros(VOCAB).long()}
        head = load(write(tmp_path, {**EAGLE3, "draft_vocab_size": VOCAB}, tensors), target)
        assert head.target_ids is None
        check(head, Reference(tensors, *theirs))

    def test_the_output_head_is_the_embedding(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors()
        for name in ("lm_head.weight", "d2t", "t2d"):
            del tensors[name]
        config = {**EAGLE3, "draft_vocab_size": VOCAB, "tie_word_embeddings": True}
        head = load(write(tmp_path, config, tensors), target)
        check(head, Reference(tensors, theirs[0], theirs[0]))

    def test_a_repeated_embedding_is_shared_and_another_kept(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        tensors = eagle3_tensors()
        tensors["embed_tokens.weight"] = theirs[0].clone()
        head = load(write(tmp_path, EAGLE3, tensors), target)
        assert head.embedding.data_ptr() == target.embedding.data_ptr()
        tensors["embed_tokens.weight"] = theirs[0] + 1
        head = load(write(tmp_path, EAGLE3, tensors), target)
        check(head, Reference(tensors, *theirs))

    def test_a_target_of_another_width(
        self, target: CausalLM, theirs: Theirs, tmp_path: Path
    ) -> None:
        wide = load_target(make_checkpoint("llama2", tmp_path / "wide", hidden_size=96))
        tensors = eagle3_tensors()
        tensors["fc.weight"] = weight(HIDDEN, 3 * 96)
        config = {**EAGLE3, "target_hidden_size": 96}
        with pytest.raises(UsageError, match=r"lacks tensor embed_tokens\.weight"):
            load(write(tmp_path, config, tensors), wide)
        tensors["embed_tokens.weight"] = weight(VOCAB, HIDDEN)
        check(load(write(tmp_path, config, tensors), wide), Reference(tensors, *theirs))

    def test_speculators_layout(self, target: CausalLM, theirs: Theirs, tmp_path: Path) -> None:
        tensors = eagle3_tensors("layers.0.")
        layer = {key: value for key, value in BASE.items() if key != "architectures"}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
            "norm_before_residual": True,
            "target_hidden_size": None,
            "transformer_layer_config": layer,
        }
        head = load(write(tmp_path, config, tensors), target)
        assert head.config.aux_layers == (0, 1, 3)
        check(head, Reference(tensors, *theirs, norm_before_residual=True))


class TestDivided:
    """The target's ranks have parts of its output head; the head needs the whole."""

    class FirstOfTwo(TensorParallel):
        rank, size = 0, 2

    def divided(self, path: Path, **settings: Any) -> CausalLM:
        config = read_model_config(path)
        settings = {"dtype": torch.float32, "device": "cpu", "progress": False, **settings}
        return load_model(path, config, tp=self.FirstOfTwo(), **settings)

    def test_it_is_read_once_more(self, target_path: Path, theirs: Theirs, tmp_path: Path) -> None:
        tensors = eagle1_tensors()
        part = self.divided(target_path)
        assert len(part.head) == VOCAB // 2
        head = load(write(tmp_path, EAGLE1, tensors), part, target_path=target_path)
        check(head, Reference(tensors, *theirs))

    def test_dummies_are_those_of_one_rank(self, target_path: Path, tmp_path: Path) -> None:
        path = write(tmp_path, EAGLE1, {})
        whole = load_model(
            target_path,
            read_model_config(target_path),
            dtype=torch.bfloat16,
            device="cpu",
            load_format="dummy",
        )
        part = self.divided(target_path, load_format="dummy", dtype=torch.bfloat16)
        settings = {"load_format": "dummy", "dtype": torch.bfloat16}
        one = load(path, whole, **settings)
        two = load(path, part, target_path=target_path, **settings)
        assert torch.equal(one.head, two.head)

    def test_without_the_targets_checkpoint_it_is_refused(
        self, target_path: Path, tmp_path: Path
    ) -> None:
        path = write(tmp_path, EAGLE1, eagle1_tensors())
        with pytest.raises(UsageError, match=r"has no lm_head\.weight, and --tp-size 2 divides"):
            load(path, self.divided(target_path))


class TestDummy:
    @pytest.mark.parametrize("config", [EAGLE1, EAGLE3, {**EAGLE1, "bias": True}])
    def test_needs_nothing_but_the_configuration(
        self, target: CausalLM, tmp_path: Path, config: dict[str, Any]
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        head, again = (load(tmp_path, target, load_format="dummy") for _ in range(2))
        other = load(tmp_path, target, load_format="dummy", seed=1)
        paged = [Paged(each) for each in (head, again, other)]
        tokens, fused = torch.arange(5), torch.randn(5, HIDDEN)
        first, second, third = (each.forward(tokens, fused, 0)[0] for each in paged)
        assert first.isfinite().all()
        assert torch.equal(first, second)
        assert not torch.equal(first, third)

    def test_the_shape_for_benchmarks_belongs_to_its_model(self) -> None:
        target = read_model_config(model_directory("llama-3.1-8b"))
        config = EagleConfig.from_pretrained(model_directory("llama-3.1-8b-eagle3"), target)
        assert config.aux_layers == (2, 16, 29)
        assert (config.draft_vocab_size, config.layer.rope) == (32000, target.rope)


class TestErrors:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path, EAGLE3, eagle3_tensors())

    def edit(self, path: Path, **changes: torch.Tensor | None) -> None:
        """Replace tensors, or remove those given as None; ``__`` stands for a dot."""
        tensors = load_file(path / "model.safetensors")
        for key, value in changes.items():
            name = key.replace("__", ".")
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    def test_missing_tensor(self, path: Path, target: CausalLM) -> None:
        self.edit(path, midlayer__hidden_norm__weight=None)
        with pytest.raises(UsageError, match=r"lacks tensor layers\.0\.hidden_norm\.weight"):
            load(path, target)

    def test_missing_output_head(self, path: Path, target: CausalLM) -> None:
        self.edit(path, lm_head__weight=None)
        with pytest.raises(UsageError, match=r"lacks tensor lm_head\.weight"):
            load(path, target)

    def test_unknown_tensor(self, path: Path, target: CausalLM) -> None:
        self.edit(path, fc_norm__weight=torch.ones(3 * HIDDEN))
        with pytest.raises(UsageError, match=r"fc_norm\.weight, which the model lacks"):
            load(path, target)

    def test_tensor_under_two_names(self, path: Path, target: CausalLM) -> None:
        self.edit(path, layers__0__hidden_norm__weight=torch.ones(HIDDEN))
        with pytest.raises(UsageError, match=r"hidden_norm\.weight, a second time"):
            load(path, target)

    def test_other_number_of_hidden_states(self, path: Path, target: CausalLM) -> None:
        self.edit(path, fc__weight=torch.zeros(HIDDEN, 2 * HIDDEN))
        with pytest.raises(UsageError, match=r"fc\.weight is \[64, 128\].*makes it \[64, 192\]"):
            load(path, target)

    @pytest.mark.parametrize(
        ("d2t", "message"),
        [
            (None, "lacks tensor d2t"),
            (torch.zeros(DRAFT - 1).long(), r"d2t is torch\.int64 \[95\]"),
            (torch.zeros(DRAFT), r"d2t is torch\.float32"),
            (torch.full((DRAFT,), VOCAB - DRAFT + 1), "d2t does not name 96 tokens of 320"),
            (-torch.arange(DRAFT), "d2t does not name 96 tokens of 320"),
        ],
    )
    def test_draft_vocabulary(
        self, path: Path, target: CausalLM, d2t: torch.Tensor | None, message: str
    ) -> None:
        self.edit(path, d2t=d2t)
        with pytest.raises(UsageError, match=message):
            load(path, target)

    def test_pickles_are_not_read(self, path: Path, target: CausalLM) -> None:
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        with pytest.raises(UsageError, match=r"pytorch_model\.bin is a pickle.*convert it"):
            load(path, target)


class TestFeatures:
    """What the target gives a head is what transformers calls hidden states."""

    @pytest.mark.parametrize("layers", [(0, 2), (1,), (1, 3), (3,), (0, 1, 2, 3)])
    @pytest.mark.parametrize("rows", [None, [9], [3, 9], []])
    def test_hidden_states(
        self, target: CausalLM, target_path: Path, layers: tuple[int, ...], rows: list[int] | None
    ) -> None:
        tokens = torch.arange(40, 50)
        with torch.inference_mode():
            out = reference_model(target_path)(tokens[None], output_hidden_states=True)
        expected = [state[0] for state in out.hidden_states]
        features, hidden = run_target(target, tokens, layers, normed=True, rows=rows)
        assert features is not None
        together = torch.cat([expected[layer] for layer in layers], -1)
        torch.testing.assert_close(features, together, rtol=1e-4, atol=1e-4)
        logits = out.logits[0] if rows is None else out.logits[0][rows]
        if len(logits):
            torch.testing.assert_close(target.compute_logits(hidden), logits, rtol=1e-4, atol=1e-4)
        assert len(hidden) == len(logits)

    def test_before_the_norm(self, target: CausalLM) -> None:
        tokens = torch.arange(10)
        plain, _ = run_target(target, tokens, (3,), normed=False)
        normed, hidden = run_target(target, tokens, (3,), normed=True)
        assert plain is not None and normed is not None
        assert torch.equal(plain, hidden)
        assert torch.equal(target.norm(plain), normed)

    def test_nothing_is_copied_without_a_place_for_it(
        self, target: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = torch.arange(10)
        _, expected = run_target(target, tokens, (0, 3), normed=True, rows=[4])
        monkeypatch.setattr(type(target), "_copy_feature", None)
        features, hidden = run_target(target, tokens, None, normed=True, rows=[4])
        assert features is None
        torch.testing.assert_close(hidden, expected)


def run_target(
    target: CausalLM,
    tokens: torch.Tensor,
    layers: tuple[int, ...] | None,
    *,
    normed: bool,
    rows: list[int] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Features and hidden states of one pass over ``tokens``."""
    config = target.config
    layout = KVLayout.of_model(
        config.num_layers, config.num_kv_heads, config.head_dim, "float32", PAGE
    )
    pages = -(-len(tokens) // PAGE)
    attention = make_attention_backend("auto", KVPool(layout, pages, "cpu"), config.num_heads)
    table = np.arange(pages, dtype=np.int32)
    attention.plan(AttentionBatch(np.array([0]), np.array([len(tokens)]), [table]))
    features = None
    if layers is not None:
        target.aux_layers, target.aux_normed = layers, normed
        features = torch.full((len(tokens), len(layers) * config.hidden_size), torch.nan)
    chosen = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    with torch.inference_mode():
        hidden = target.forward(
            tokens, torch.arange(len(tokens)), attention, rows=chosen, features=features
        )
    return features, hidden
