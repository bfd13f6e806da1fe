"""Checkpoints in fp8: logits equal those of transformers with the weights that they stand for and
inputs rounded by the test."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from fp8_checkpoints import KINDS, SHAPES, compute_logits, make_fp8_checkpoint
from greedy_engine import Sequence, generate
from safetensors.torch import load_file, save_file
from threaded_ranks import Threads, make_runner

from pd.core.errors import UnsupportedModelError, UsageError
from pd.kernels.fp8 import Fp8Inputs, WideWeight, convert_saturated, round_inputs
from pd.models import matrix
from pd.models.config_reader import parse_model_config, read_model_config
from pd.models.layers import Linear
from pd.models.loader import load_model
from pd.models.quantization_reader import quantize_at_load
from pd.models.tensor_parallel import SINGLE, TensorParallel, WeightDestination

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Fp8Checkpoint = Callable[[str, str], tuple[Path, Path]]

SEED = 11
DOWN = "model.layers.1.mlp.down_proj"
FLOAT = {"num_bits": 8, "type": "float"}
PROMPTS = np.random.default_rng(SEED).integers(0, VOCAB_SIZE, (8, 12)).tolist()
QUICK = {("llama3", "block"), ("qwen3_moe", "ue8m0"), ("deepseek_v3", "block")}
QUICK |= {("llama3", kind) for kind in ("channel", "static", "modelopt")}


def list_cases(quick: set[tuple[str, str]]) -> list[Any]:
    cases = [(architecture, kind) for architecture in SHAPES for kind in KINDS]
    return [pytest.param(*c, marks=[] if c in quick else pytest.mark.full) for c in cases]


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Fp8Checkpoint:
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(architecture: str, kind: str) -> tuple[Path, Path]:
        if (architecture, kind) not in made:
            directory = tmp_path_factory.mktemp(f"{architecture}-{kind}")
            made[architecture, kind] = make_fp8_checkpoint(architecture, kind, directory)
        return made[architecture, kind]

    return make


def generate_two(
    path: Path, tp: TensorParallel = SINGLE, max_chunk: int = 50, ep_size: int = 1
) -> list[Sequence]:
    """Prefill the prompts and decode one token after each."""
    runner = make_runner(path, tp, ep_size=ep_size)
    return generate(runner, PROMPTS, 2, max_chunk=max_chunk, seed=0)


def check_logits(
    sequences: list[Sequence], plain: Path, kind: str, num_equal: int = 5, **settings: Any
) -> None:
    """Compare logits with transformers'.

    Sums in another order differ by 1e-7, and fp8 makes such a difference a thousand times larger if
    a value is in the middle between two numbers. So a few prompts may differ, but ``num_equal`` do
    not.
    """
    errors = []
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        expected = compute_logits(plain, kind, prompt + sequence.output[:1], **settings)[-2:]
        errors.append(float((torch.stack(sequence.logits) - expected).norm() / expected.norm()))
    errors.sort()
    assert errors[num_equal - 1] < 1e-5 and errors[-1] < 0.2, f"{errors}, seed {SEED}"


@pytest.mark.parametrize(("architecture", "kind"), list_cases(QUICK))
def test_logits_equal_transformers_with_rounded_inputs(
    fp8_checkpoint: Fp8Checkpoint, architecture: str, kind: str
) -> None:
    path, plain = fp8_checkpoint(architecture, kind)
    check_logits(generate_two(path), plain, kind)


@pytest.mark.parametrize(("architecture", "kind"), list_cases({("qwen3_moe", "ue8m0")}))
def test_a_token_does_not_depend_on_its_chunk(
    fp8_checkpoint: Fp8Checkpoint, architecture: str, kind: str
) -> None:
    path, plain = fp8_checkpoint(architecture, kind)
    check_logits(generate_two(path, max_chunk=5), plain, kind)


@pytest.mark.parametrize(("architecture", "kind"), list_cases({("deepseek_v3", "block")}))
def test_two_ranks_equal_transformers(
    fp8_checkpoint: Fp8Checkpoint, architecture: str, kind: str
) -> None:
    """Their parts begin in the middle of blocks."""
    path, plain = fp8_checkpoint(architecture, kind)
    for sequences in Threads(2).run(lambda rank: generate_two(path, rank)):
        check_logits(sequences, plain, kind, parts=2)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        case
        for case in list_cases({("deepseek_v3", "block"), ("qwen3_moe", "channel")})
        if case.values[0] != "llama3"
    ],
)
def test_ranks_with_different_experts_equal_transformers(
    fp8_checkpoint: Fp8Checkpoint, architecture: str, kind: str
) -> None:
    """Experts are whole, so their inputs have common scales. Other weights are divided."""
    path, plain = fp8_checkpoint(architecture, kind)
    for sequences in Threads(2).run(lambda rank: generate_two(path, rank, ep_size=2)):
        check_logits(sequences, plain, kind, 3, parts=2, expert_parts=1)


@pytest.mark.parametrize(
    "kind",
    ["block", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("channel", "static"))],
)
def test_two_groups_of_two_ranks_equal_transformers(
    fp8_checkpoint: Fp8Checkpoint, kind: str
) -> None:
    path, plain = fp8_checkpoint("qwen3_moe", kind)
    for sequences in Threads(4).run(lambda rank: generate_two(path, rank, ep_size=2)):
        check_logits(sequences, plain, kind, 3, parts=4, expert_parts=2)


WEIGHTS_STAY = {("llama3", "block"), ("llama3", "static"), ("deepseek_v3", "block")}


@pytest.mark.parametrize(
    ("architecture", "kind"), list_cases(WEIGHTS_STAY | {("qwen3_moe", "block")})
)
def test_logits_with_weights_that_stay_in_fp8(
    fp8_checkpoint: Fp8Checkpoint, architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: norms and activations convert their results for the products that follow."""
    monkeypatch.setattr(matrix, "computes_wide", lambda _: False)
    path, plain = fp8_checkpoint(architecture, kind)
    check_logits(generate_two(path, max_chunk=5), plain, kind)


PLAIN_MODULES = ("0.self_attn.o_proj", "1.mlp.down_proj", "2.self_attn.q_proj")


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_weights_without_a_scale_are_not_quantized(tmp_path: Path, kind: str) -> None:
    """Weights that are fused with one of them are computed in the model's dtype, too."""
    path, plain = make_fp8_checkpoint("llama3", kind, tmp_path, PLAIN_MODULES)
    exact = (*PLAIN_MODULES, "2.self_attn.k_proj", "2.self_attn.v_proj")
    check_logits(generate_two(path), plain, kind, plain_modules=exact)


def test_conversion_at_load_equals_a_checkpoint_with_a_scale_per_channel(
    fp8_checkpoint: Fp8Checkpoint, tmp_path: Path
) -> None:
    path, _ = fp8_checkpoint("llama3", "channel")
    wide = make_checkpoint("llama3", tmp_path, **SHAPES["llama3"])
    config = quantize_at_load(read_model_config(wide), "fp8")
    for size in (1, 2):
        for rank in [TensorParallel()] if size == 1 else Threads(2).run(lambda rank: rank):
            found, expected = (
                load_model(p, c, dtype=torch.float32, device="cpu", tp=rank)
                for p, c in ((wide, config), (path, read_model_config(path)))
            )
            for mine, other in zip(found.modules(), expected.modules(), strict=True):
                if isinstance(mine, Linear) and isinstance(mine.weight, WideWeight):
                    assert torch.equal(*(unpack(m.weight.values) for m in (mine, other)))
    assert quantize_at_load(read_model_config(path), "fp8") == read_model_config(path)


def test_conversion_at_load_does_not_depend_on_the_rank_of_an_expert(tmp_path: Path) -> None:
    """Scales follow from whole rows, wherever an expert is, and however it is divided."""
    path = make_checkpoint("qwen3_moe", tmp_path)
    config = quantize_at_load(read_model_config(path), "fp8")

    def list_experts(rank: TensorParallel, ep_size: int = 1) -> dict[str, WeightDestination]:
        model = load_model(
            path, config, dtype=torch.float32, device="cpu", tp=rank, ep_size=ep_size
        )
        return {name: place for name, place in model.list_tensors() if ".experts." in name}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd.models.causal_lm.CausalLM.prepare_weights", lambda model: None)
        whole = list_experts(SINGLE)
        found: set[str] = set()
        for rank in Threads(4).run(lambda rank: rank):
            for name, place in list_experts(rank, 2).items():
                rows, columns = place.slice_part(rank)
                one, other = whole[name], place
                assert one.fp8 is not None and other.fp8 is not None
                assert torch.equal(one.memory[rows, columns].float(), other.memory.float()), name
                assert torch.equal(one.fp8.scales[rows], other.fp8.scales), name
                found.add(name)
    assert found == whole.keys()


@pytest.mark.parametrize("size", [1, 2])
def test_fused_weights_of_phi3_are_converted_at_load(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.models.causal_lm.CausalLM.prepare_weights", lambda model: None)
    path = make_checkpoint("phi3", tmp_path)
    plain = read_model_config(path)
    for rank in Threads(size).run(lambda rank: rank):
        fp8, wide = (
            dict(load_model(path, c, dtype=torch.float32, device="cpu", tp=rank).list_tensors())
            for c in (quantize_at_load(plain, "fp8"), plain)
        )
        converted = [name for name, place in fp8.items() if place.fp8 is not None]
        assert len(converted) == 3 * 7
        for name in converted:
            scales = fp8[name].fp8.scales
            torch.testing.assert_close(
                fp8[name].memory.float() * scales, wide[name].memory, rtol=0.065, atol=0.01
            )


def unpack(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.layout != torch.strided else weight


@pytest.mark.parametrize("architecture", SHAPES)
def test_dummy_weights_of_ranks_are_parts_of_the_same(
    fp8_checkpoint: Fp8Checkpoint, architecture: str
) -> None:
    path, _ = fp8_checkpoint(architecture, "static")
    runners = [
        make_runner(path, SINGLE, load_format="dummy"),
        *Threads(2).run(lambda rank: make_runner(path, rank, load_format="dummy")),
    ]
    one, left, right = (
        next(m.output.matrix for m in r.model.modules() if hasattr(m, "output")).weight
        for r in runners
    )
    parts = torch.cat([unpack(left.values), unpack(right.values)], 1)
    assert torch.equal(unpack(one.values), parts)
    assert 0.5 < float(parts.std()) * parts.shape[1] ** 0.5 < 1.5


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"quant_method": "awq"}, "quantization_config.quant_method = 'awq'"),
            ({"quant_method": "mxfp4"}, "quantization_config.quant_method = 'mxfp4'"),
            ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
            (
                {"quant_method": "fp8", "weight_block_size": [64, 64]},
                r"quantization_config.weight_block_size = \[64, 64\]",
            ),
            (
                {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                "quantization_config.quant_algo = 'NVFP4'",
            ),
            (
                {"quant_method": "compressed-tensors", "format": "pack-quantized"},
                "quantization_config.format = 'pack-quantized'",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}},
                },
                "quantization_config.config_groups.g.weights.num_bits = 4",
            ),
            (
                {
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "g": {
                            "weights": {**FLOAT, "strategy": "tensor"},
                            "input_activations": {
                                **FLOAT,
                                "strategy": "tensor",
                                "dynamic": True,
                            },
                        }
                    },
                },
                "input_activations.strategy with dynamic = 'tensor'",
            ),
        ],
    )
    def test_other_formats_are_named(
        self, fp8_checkpoint: Fp8Checkpoint, settings: dict[str, Any], message: str
    ) -> None:
        path, _ = fp8_checkpoint("llama3", "block")
        raw = json.loads((path / "config.json").read_text())
        with pytest.raises(UnsupportedModelError, match=message):
            parse_model_config(raw | {"quantization_config": settings}, {})

    def test_a_gpu_without_fp8(
        self, fp8_checkpoint: Fp8Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
        path, _ = fp8_checkpoint("llama3", "block")
        with pytest.raises(UnsupportedModelError, match=r"8\.9 or later\), not NVIDIA A100$"):
            load_model(path, read_model_config(path), dtype=torch.float32, device="cuda:0")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda t: t.pop(f"{DOWN}.input_scale"), f"{DOWN}.weight_scale needs one scale"),
            (
                lambda t: t.update({f"{DOWN}.weight_scale": torch.ones(7, 1)}),
                rf"{DOWN}.weight_scale is \[7, 1\], config.json makes it \[160, 1\]",
            ),
            (
                lambda t: t.update({f"{DOWN}.weight_scale": torch.tensor(torch.nan)}),
                f"{DOWN}.weight_scale holds scales that are negative or not finite",
            ),
            (
                lambda t: t.pop(f"{DOWN}.weight_scale"),
                f"{DOWN}.weight is torch.float8_e4m3fn without a scale",
            ),
            (
                lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"].float()}),
                f"{DOWN}.weight is torch.float32 but has {DOWN}.weight_scale",
            ),
        ],
    )
    def test_tensors_that_contradict_each_other(
        self,
        fp8_checkpoint: Fp8Checkpoint,
        tmp_path: Path,
        change: Callable[[dict[str, torch.Tensor]], object],
        message: str,
    ) -> None:
        made, _ = fp8_checkpoint("llama3", "static")
        path = shutil.copytree(made, tmp_path / "changed")
        shard = next(p for p in path.glob("*.safetensors") if f"{DOWN}.weight" in load_file(p))
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, {"format": "pt"})
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        if shard.name != "model.safetensors":
            everything: dict[str, torch.Tensor] = {}
            for part in path.glob("*.safetensors"):
                everything |= load_file(part)
            save_file(everything, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UsageError, match=message):
            load_model(path, read_model_config(path), dtype=torch.float32, device="cpu")


class TestConversion:
    def test_large_values_saturate(self) -> None:
        x = torch.tensor([1e9, -1e9, 465.0, 448.0, 0.0])
        assert convert_saturated(x).tolist() == [448.0, -448.0, 448.0, 448.0, 0.0]
        static = Fp8Inputs(5, scale=torch.tensor([1.0]))
        assert round_inputs(x[None], static).tolist() == [[448.0, -448.0, 448.0, 448.0, 0.0]]

    def test_a_row_does_not_depend_on_others(self) -> None:
        x = torch.randn(5, 200, generator=torch.Generator().manual_seed(SEED))
        x[2] *= 1e6
        x[3] = 0
        for inputs in (Fp8Inputs(200), Fp8Inputs(200, 128, 72, rounds_scales=True)):
            together = round_inputs(x, inputs)
            assert torch.equal(together, torch.cat([round_inputs(r[None], inputs) for r in x]))
            assert (together - x).abs().max() <= 2**-4 * x.abs().max()
            assert not together[3].any()
