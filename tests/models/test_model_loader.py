"""Weights end up where they belong, without a second copy, or loading says what is wrong."""

from __future__ import annotations

import ctypes
import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import ARCHITECTURES, SHARDED, make_checkpoint
from safetensors.torch import load_file, save_file

from pd.core.errors import UsageError
from pd.models import causal_lm, loader, matrix
from pd.models.config_reader import read_model_config
from pd.models.loader import load_model
from pd.models.tensor_parallel import SINGLE, WeightDestination

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.models.causal_lm import CausalLM

    Checkpoint = Callable[[str], Path]

SHARD = "model.safetensors"


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay in the layout of the checkpoint, so that tests can look at them."""
    monkeypatch.setattr(causal_lm.CausalLM, "prepare_weights", lambda model: None)


def load(path: Path, **settings: Any) -> CausalLM:
    settings = {"dtype": torch.float32, "device": "cpu", **settings}
    return load_model(path, read_model_config(path), **settings)


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint in one file that a test may spoil."""
    for file in checkpoint("llama2").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors, or remove those given as None; ``__`` stands for a dot."""
    tensors = load_file(path / SHARD)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / SHARD, {"format": "pt"})


def split_fused(
    stored: dict[str, torch.Tensor], places: dict[str, WeightDestination]
) -> dict[str, torch.Tensor]:
    """The tensors of Phi-3's fused ones."""
    found = {}
    for name, tensor in stored.items():
        for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            if f".{fused}." in name and name not in places and "experts" not in name:
                names = [name.replace(fused, f"{part}_proj") for part in parts]
                sizes = [len(places[each].memory) for each in names]
                found |= dict(zip(names, tensor.split(sizes), strict=True))
    return found


@pytest.mark.usefixtures("unprepared")
class TestReading:
    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_every_tensor_is_read_into_its_place(
        self, checkpoint: Checkpoint, architecture: str
    ) -> None:
        path = checkpoint(architecture)
        shards = sorted(path.glob("*.safetensors"))
        assert (len(shards) > 1) == (architecture in SHARDED)
        stored = {name: t for shard in shards for name, t in load_file(shard).items()}
        model = load(path)
        places = dict(model.list_tensors())
        stored |= split_fused(stored, places)
        assert set(places) <= set(stored)
        for name, place in places.items():
            assert torch.equal(place.memory, stored[name]), name

    def test_places_cover_every_parameter_once(self, checkpoint: Checkpoint) -> None:
        model = load(checkpoint("qwen3_moe"))
        places = [place.memory for _, place in model.list_tensors()]
        assert sum(t.numel() for t in places) == sum(p.numel() for p in model.parameters())

    def test_weights_are_converted_to_the_dtype(self, copy: Path) -> None:
        model = load(copy, dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert torch.get_default_dtype() == torch.float32

    def test_tied_head_is_the_embedding(self, checkpoint: Checkpoint) -> None:
        model = load(checkpoint("qwen2"))
        assert model.head is model.embedding

    def test_a_repeated_tied_head_is_accepted_and_another_refused(self, tmp_path: Path) -> None:
        path = make_checkpoint("qwen2", tmp_path)
        embedding = load_file(path / SHARD)["model.embed_tokens.weight"]
        edit(path, lm_head__weight=embedding.clone())
        load(path)
        edit(path, lm_head__weight=embedding + 1)
        with pytest.raises(UsageError, match=r"lm_head\.weight differs"):
            load(path)


class TestMemory:
    def test_no_second_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither while reading nor while weights are laid out anew does memory exceed the
        parameters by more than the largest fused weight."""
        path = make_checkpoint("llama2", tmp_path, hidden_size=512, intermediate_size=2048)
        peaks = []

        def measured(function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                result = function(*args)
                peaks.append(anonymous_memory())
                return result

            return wrapper

        monkeypatch.setattr(loader, "_copy_tensor", measured(loader._copy_tensor))
        for module in (matrix, causal_lm):
            monkeypatch.setattr(module, "pack_weight", measured(matrix.pack_weight))
        before = anonymous_memory()
        model = load(path)
        sizes = [parameter.numel() * 4 for parameter in model.parameters()]
        assert sum(sizes) > 40e6
        assert len(peaks) > 40
        assert max(peaks) - before < sum(sizes) + max(sizes) + 4e6


class TestErrors:
    def test_missing_tensor(self, copy: Path) -> None:
        edit(copy, model__layers__1__self_attn__k_proj__bias=None)
        with pytest.raises(UsageError, match=r"lacks tensor model\.layers\.1\.self_attn\.k_proj"):
            load(copy)

    def test_fused_tensors(self, tmp_path: Path) -> None:
        """Too few rows, a part that is there twice, and a fused tensor that is missing."""
        path = make_checkpoint("phi3", tmp_path)
        name = "model__layers__1__self_attn__qkv_proj__weight"
        fused = load_file(path / SHARD)[name.replace("__", ".")]
        assert list(fused.shape) == [192, 64]
        edit(path, **{name: fused[:-1].clone()})
        message = r"qkv_proj\.weight is \[191, 64\], config\.json makes it \[192, 64\]"
        with pytest.raises(UsageError, match=message):
            load(path)
        part = name.replace("qkv", "k")
        edit(path, **{name: fused, part: fused[96:144].clone()})
        with pytest.raises(UsageError, match=r"qkv_proj\.weight, a second time"):
            load(path)
        edit(path, **{name: None, part: None})
        with pytest.raises(UsageError, match=r"lacks tensor .*1\.self_attn\.k_proj.* and 2 more"):
            load(path)

    def test_unexpected_tensor(self, copy: Path) -> None:
        edit(copy, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
        with pytest.raises(UsageError, match=r"self_attn\.q_norm\.weight, which the model lacks"):
            load(copy)

    def test_rotary_frequencies_of_old_checkpoints_are_no_weights(self, copy: Path) -> None:
        edit(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
        load(copy)

    def test_misshaped_tensor(self, copy: Path) -> None:
        edit(copy, model__layers__2__mlp__down_proj__weight=torch.zeros(64, 95))
        with pytest.raises(UsageError, match=r"mlp\.down_proj\.weight is \[64, 95\].*\[64, 96\]"):
            load(copy)

    def test_quantized_tensor(self, copy: Path) -> None:
        edit(copy, lm_head__weight=torch.zeros((320, 64), dtype=torch.int8))
        with pytest.raises(UsageError, match=r"lm_head\.weight is torch\.int8"):
            load(copy)

    def test_no_weights(self, copy: Path) -> None:
        (copy / SHARD).unlink()
        with pytest.raises(UsageError, match="--load-format dummy"):
            load(copy)

    def test_damaged_file(self, copy: Path) -> None:
        (copy / SHARD).write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
        with pytest.raises(UsageError, match=r"cannot read .*model\.safetensors"):
            load(copy)

    def test_missing_shard(self, copy: Path) -> None:
        index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
        (copy / loader.INDEX).write_text(json.dumps(index))
        with pytest.raises(UsageError, match="lacks model-00001-of-00002"):
            load(copy)

    def test_index_that_is_none(self, copy: Path) -> None:
        (copy / loader.INDEX).write_text("[]")
        with pytest.raises(UsageError, match="is not a safetensors index"):
            load(copy)


@pytest.mark.usefixtures("unprepared")
class TestDummy:
    def test_needs_nothing_but_the_configuration(
        self, checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        config = read_model_config(checkpoint("qwen3_moe"))
        model = load_model(tmp_path, config, dtype=torch.float32, device="cpu", load_format="dummy")
        assert all(torch.isfinite(p).all() for p in model.parameters())

    def test_depends_on_the_seed_alone(self, checkpoint: Checkpoint) -> None:
        path = checkpoint("llama3")
        first, again = load(path, load_format="dummy"), load(path, load_format="dummy")
        half = load(path, load_format="dummy", dtype=torch.bfloat16)
        other = load(path, load_format="dummy", seed=1)
        pairs = zip(first.parameters(), again.parameters(), half.parameters(), strict=True)
        for a, b, c in pairs:
            assert torch.equal(a, b)
            assert torch.equal(a.bfloat16(), c)
        assert not torch.equal(first.embedding, other.embedding)

    def test_a_large_tensor_repeats_no_row(self) -> None:
        tensor = torch.empty(3, loader._DUMMY_BLOCK // 2)
        normal = torch.randn(loader._DUMMY_BLOCK, generator=torch.Generator().manual_seed(1))
        loader._fill_normal(WeightDestination(tensor), SINGLE, 1.0, normal)
        assert abs(float(tensor.std()) - 1) < 0.01
        assert abs(float((tensor[0] * tensor[2]).mean())) < 0.01


def anonymous_memory() -> int:
    """Bytes of this process's memory that back no file (those of a mapped shard do).

    What was freed is given back first, so that the C library's reserves do not count.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux reports RssAnon")
