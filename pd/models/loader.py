"""Makes a model. Weights are read tensor by tensor into their final place, or are seeded dummies.

A rank of a tensor-parallel model reads only its own part of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pd.core.errors import UnsupportedModelError, UsageError
from pd.kernels.fp8 import FP8, convert_saturated, has_fp8
from pd.kernels.linear import pack_weight
from pd.models.causal_lm import EMBEDDING, HEAD
from pd.models.checkpoint import INDEX, find_checkpoint
from pd.models.config import MX_BLOCK
from pd.models.registry import find_architecture
from pd.models.scales import (
    MXFP4_SCALES,
    NO_SCALES,
    Scales,
    find_weight,
    is_scale,
    is_unused,
    quantize_whole,
)
from pd.models.tensor_parallel import SINGLE, TensorParallel, WeightDestination
from pd.util.output import unwrap_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig, QuantizationConfig
    from pd.models.layers import NamedPlaces

NOTHING_FUSED: Mapping[str, tuple[str, ...]] = {}
# Rotary frequencies in older checkpoints. We compute them instead.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"
# The number of an expert in the name of its tensor.
_EXPERT = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")
# Dummy weights repeat a block of this many normal numbers, because drawing 8 billion numbers one by
# one would take minutes. It is a prime, so no two rows of a matrix are alike.
_DUMMY_BLOCK = 4_194_301
# Standard deviation of random codes in MXFP4 before they are scaled.
_MXFP4_STD = 2.9
# Standard deviation of dummy weights in fp8 before they are scaled, and the scale of their inputs,
# which are rarely above 6.
_FP8_STD = 112.0
_FP8_INPUT_SCALE = 6.0 / 448.0


class _LazyTensor(Protocol):
    """A tensor of a safetensors file. Indexing it reads its data."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


class Stored(Protocol):
    """The methods that we use of an open safetensors file, which has no types itself."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _LazyTensor: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class ListsTensors(Protocol):
    """A module whose weights :func:`fill_module` fills."""

    def list_tensors(self) -> NamedPlaces: ...


class _FusedRows:
    """One of several tensors that a file holds as one: some of its rows."""

    def __init__(self, tensor: _LazyTensor, first: int, stop: int) -> None:
        self._tensor, self._first = tensor, first
        self._shape = [stop - first, *tensor.get_shape()[1:]]

    def keys(self) -> list[str]:
        return []

    def get_slice(self, name: str) -> _LazyTensor:
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[tuple(slice(0, size) for size in self._shape)]

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = index
        rows = slice(self._first + rows.start, self._first + rows.stop)
        return self._tensor[(rows, *columns)]


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    tp: TensorParallel = SINGLE,
    ep_size: int = 1,
) -> CausalLM:
    """Build the model of ``config``, or a rank's part of it, and fill its weights.

    Args:
        config: configuration of the whole model.
        path: the checkpoint's directory (or an id in the local cache); not read for ``dummy``.
        load_format: ``auto`` reads safetensors. ``dummy`` makes random weights that depend only on
            ``seed`` and the tensors' names and shapes, so ranks have parts of the same weights.
        progress: show a bar on standard error if it is a terminal and loading takes over 2 s.
        ep_size: number of groups of ranks that have different experts.

    Raises:
        UsageError: the weights are missing or do not match ``config`` (names the tensor), or
            ``tp.size`` ranks cannot divide them.
        UnsupportedModelError: the device cannot compute with weights in fp8.
    """
    if config.quantization is not None:
        _check_fp8(path, torch.device(device))
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            architecture = find_architecture(config.architecture)
            model = architecture.make_model(config.split_by_ranks(tp.size, ep_size), tp)
        finally:
            torch.set_default_dtype(previous)
    tied = model.config.tie_word_embeddings

    ends = [config.num_layers + i for i in range(config.num_draft_layers)]
    ignored = tuple(f"model.layers.{layer}." for layer in ends)

    def is_known(name: str, stored: Stored, shard: Path) -> bool:
        if name.startswith(ignored) or is_unused(name):
            return True
        if (find_weight(name) if is_scale(name) else name) in elsewhere:
            return True
        if name != HEAD or not tied:
            return False
        _check_tied(stored.get_tensor(name), shard.parent)
        return True

    elsewhere = frozenset[str]()
    if ep_size > 1:
        names = [name for name, _ in model.list_tensors()]
        elsewhere = _list_other_experts(names, config.num_experts)
    fill_module(
        model,
        path,
        config.quantization,
        load_format,
        seed,
        progress,
        tp,
        is_known,
        architecture.fused,
    )
    model.prepare_weights()
    return model.eval()


def _list_other_experts(names: Iterable[str], num_experts: int) -> frozenset[str]:
    """List the names in a checkpoint of the tensors of other ranks' experts, given the names of
    this rank's tensors."""
    kinds = {_EXPERT.sub("*", name) for name in names if _EXPERT.search(name)}
    every = (kind.replace("*", str(expert)) for kind in kinds for expert in range(num_experts))
    return frozenset(every).difference(names)


def load_whole_head(
    target: CausalLM, path: str | Path, load_format: str, seed: int
) -> torch.Tensor:
    """Return the whole output head of a model, ready for :func:`pd.kernels.linear.linear`. If the
    model's ranks divide it, it is read once more.

    Args:
        path, load_format, seed: those with which ``target`` was loaded.
    """
    if target.tp.size == 1:
        return target.head
    if target.config.tie_word_embeddings:
        return target.embedding
    whole = torch.empty_like(target.embedding)
    place = {HEAD: WeightDestination(whole)}
    fill_weights(place, path, load_format, seed, False, SINGLE, lambda name, stored, shard: True)
    return pack_weight(whole)


def fill_module(
    module: ListsTensors,
    path: str | Path,
    quantization: QuantizationConfig | None,
    load_format: str,
    seed: int,
    progress: bool,
    tp: TensorParallel,
    is_known: Callable[[str, Stored, Path], bool],
    fused: Mapping[str, tuple[str, ...]] = NOTHING_FUSED,
) -> None:
    """Fill the weights of a module with :func:`fill_weights`. Weights of the module that may be in
    fp8 are so if the checkpoint has scales for them."""
    # NOTE: prepare_weights() frees weights as it goes, so nothing else may refer to their memory by
    # then.
    places, scales = dict(module.list_tensors()), NO_SCALES
    if quantization is not None and not quantization.at_load and load_format != "dummy":
        scales = _read_scales(find_checkpoint(path), places, quantization)
        for name, place in places.items():
            if place.fp8 is not None and scales.find_scale(name) is None:
                place.fp8.make_plain()
        places = dict(module.list_tensors())
    fill_weights(
        places, path, load_format, seed, progress, tp, is_known, scales=scales, fused=fused
    )


def _check_fp8(path: str | Path, device: torch.device) -> None:
    """Raise UnsupportedModelError unless the device can compute with weights in fp8."""
    if not has_fp8(device):
        raise UnsupportedModelError(
            f"{path}: weights in fp8 need a GPU with tensor cores for fp8 (compute capability 8.9 "
            f"or later), not {torch.cuda.get_device_name(device)}"
        )


def fill_weights(
    places: dict[str, WeightDestination],
    path: str | Path,
    load_format: str,
    seed: int,
    progress: bool,
    tp: TensorParallel,
    is_known: Callable[[str, Stored, Path], bool],
    canonical: Callable[[str], str] = str,
    scales: Scales = NO_SCALES,
    fused: Mapping[str, tuple[str, ...]] = NOTHING_FUSED,
) -> None:
    """Fill every place from a checkpoint, or with dummy weights. See :func:`load_model` for the
    other arguments.

    Args:
        places: by name.
        is_known: called with the name of each other tensor, the open file and its path. Returns
            whether the checkpoint may hold that tensor.
        canonical: maps a name in the checkpoint to a name among ``places``.
        scales: scales of fp8 weights. Weights without them are quantized here if their place is in
            fp8.
        fused: of the :class:`pd.models.architecture.Architecture`.

    Raises:
        UsageError: a tensor is missing, misshaped, quantized in an unsupported way or unknown.
    """
    bar = tqdm(
        total=sum(place.memory.nbytes for place in places.values()),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        delay=2,
        disable=not progress or not sys.stderr.isatty(),
        file=unwrap_stream(sys.stderr),
    )
    with bar:
        if load_format == "dummy":
            _fill_dummy(places, tp, seed, bar)
        else:
            directory = find_checkpoint(path)
            _read_checkpoint(directory, places, tp, bar, is_known, canonical, scales, fused)


def _read_scales(
    directory: Path, weights: dict[str, WeightDestination], quantization: QuantizationConfig
) -> Scales:
    """Read the scales of these weights. They are small, so we have all of them before we read the
    first weight."""
    tensors = {}
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            for name in stored.keys():  # noqa: SIM118
                if is_scale(name) and find_weight(name) in weights:
                    tensors[name] = stored.get_tensor(name)
    return Scales(tensors, quantization.in_blocks, quantization.has_input_scales)


def _read_checkpoint(
    directory: Path,
    places: dict[str, WeightDestination],
    tp: TensorParallel,
    bar: tqdm,
    is_known: Callable[[str, Stored, Path], bool],
    canonical: Callable[[str], str],
    scales: Scales,
    fused: Mapping[str, tuple[str, ...]],
) -> None:
    """Fill every place, opening one shard at a time and copying one tensor at a time."""
    missing = set(places)
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            # Not a dictionary: safe_open's handle is iterated by keys() only.
            for name in stored.keys():  # noqa: SIM118
                key = canonical(name)
                parts = _find_parts(key, fused)
                if parts and missing.issuperset(parts):
                    some = {part: places[part] for part in parts}
                    _copy_fused(stored, some, tp, name, shard, scales)
                    missing.difference_update(parts)
                    bar.update(sum(place.memory.nbytes for place in some.values()))
                elif key in missing:
                    _copy_tensor(stored, places[key], tp, name, shard, scales)
                    missing.discard(key)
                    bar.update(places[key].memory.nbytes)
                elif (
                    not scales.has_tensor(name)
                    and not is_known(name, stored, shard)
                    and not name.endswith(_IGNORED_SUFFIX)
                ):
                    is_place = key in places or not places.keys().isdisjoint(parts)
                    what = "a second time" if is_place else "which the model lacks"
                    raise UsageError(f"{shard} holds tensor {name}, {what}")
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(f"{directory} lacks tensor {min(missing)}{more}")


def _find_parts(name: str, fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the tensors that are fused into one with this name; none if it is a
    single tensor."""
    module, _, kind = name.rpartition(".")
    parent, _, module = module.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in fused.get(module, ())]


def _copy_fused(
    stored: Stored,
    places: dict[str, WeightDestination],
    tp: TensorParallel,
    name: str,
    shard: Path,
    scales: Scales,
) -> None:
    """Copy the parts of a fused tensor, which ``places`` has in their order."""
    whole = stored.get_slice(name)
    shapes = [place.whole_shape(tp) for place in places.values()]
    expected = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
    if list(whole.get_shape()) != expected:
        raise UsageError(
            f"{shard}: tensor {name} is {list(whole.get_shape())}, config.json makes it {expected}"
        )
    stop = 0
    for (part, place), shape in zip(places.items(), shapes, strict=True):
        first, stop = stop, stop + shape[0]
        _copy_tensor(_FusedRows(whole, first, stop), place, tp, part, shard, scales)


def _copy_tensor(
    stored: Stored,
    place: WeightDestination,
    tp: TensorParallel,
    name: str,
    shard: Path,
    scales: Scales,
) -> None:
    whole = stored.get_slice(name)
    shape, expected = list(whole.get_shape()), place.whole_shape(tp)
    if shape != expected:
        raise UsageError(f"{shard}: tensor {name} is {shape}, config.json makes it {expected}")
    scale = scales.find_scale(name)
    is_whole = place.is_whole or (place.fp8 is not None and scale is None)
    part = stored.get_tensor(name) if is_whole else whole[place.slice_part(tp)]
    if place.memory.dtype == torch.uint8 == part.dtype:
        place.memory.copy_(part)
    elif place.memory.dtype == torch.uint8:
        raise UsageError(f"{shard}: tensor {name} is {part.dtype}, but MXFP4 is stored in bytes")
    elif scale is not None and part.dtype == FP8:
        scales.copy_quantized(place, tp, part, scale)
    elif not part.is_floating_point() or part.element_size() < 2:
        raise UsageError(
            f"{shard}: tensor {name} is {part.dtype} without a scale and a quantization_config in "
            "config.json; see docs/models.md for supported formats"
        )
    elif scale is not None:
        raise UsageError(f"{shard}: tensor {name} is {part.dtype} but has {scale.name}")
    elif place.fp8 is not None:
        quantize_whole(place, tp, part)
    else:
        place.memory.copy_(part)


def _check_tied(head: torch.Tensor, directory: Path) -> None:
    """Raise UsageError unless the head that a checkpoint repeats equals the embedding."""
    for shard in list_shards(directory):
        with open_shard(shard) as stored:
            if EMBEDDING in stored.keys() and torch.equal(stored.get_tensor(EMBEDDING), head):  # noqa: SIM118
                return
    raise UsageError(
        f"{directory}: {HEAD} differs from {EMBEDDING} although config.json ties them "
        "(tie_word_embeddings = True)"
    )


@contextmanager
def open_shard(shard: Path) -> Iterator[Stored]:
    """Open a file of a checkpoint. Raises UsageError if the file or one of its tensors is
    unreadable."""
    try:
        with safe_open(shard, framework="pt", device="cpu") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read {shard}: {error}") from None


def list_shards(directory: Path) -> list[Path]:
    """List the files named by the index, or the only one."""
    index = directory / INDEX
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            pickled = next(directory.glob("pytorch_model*.bin"), None)
            if pickled is not None:
                raise UsageError(
                    f"{pickled} is a pickle, which could run code when it is read: convert it to "
                    "model.safetensors"
                )
            raise UsageError(
                f"{directory} holds neither model.safetensors nor {INDEX}; "
                "pass --load-format dummy for random weights"
            )
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UsageError(f"{index} is not a safetensors index") from None
    for name in names:
        if not (directory / name).is_file():
            raise UsageError(f"{directory} lacks {name}, which {INDEX} names")
    return [directory / name for name in names]


def _fill_dummy(
    places: dict[str, WeightDestination], tp: TensorParallel, seed: int, bar: tqdm
) -> None:
    """Fill in random weights that keep the size of activations and let every token matter.

    Matrices are normal with variance 1 / inputs, norms are 1 and biases are small. The embedding
    has variance 1. If it is the output head, too, we scale it like a matrix: otherwise every token
    would predict itself, and greedy output would repeat one token.
    """
    is_tied = EMBEDDING in places and HEAD not in places
    embedding_scale = places[EMBEDDING].memory.shape[-1] ** -0.5 if is_tied else 1.0
    # Experts are many, so they share numbers, and each begins elsewhere in them.
    experts = [place for name, place in places.items() if _EXPERT.search(name)]
    shared = torch.empty(0)
    if experts:
        count = max(_count_block(place, tp) for place in experts)
        shared = _draw_normal(count, f"{seed}/experts").to(experts[0].memory.device)
    for name, place in places.items():
        if name.endswith("norm.weight"):
            place.memory.fill_(1.0)
        elif place.memory.dtype == torch.uint8:
            _fill_mxfp4(name, place, tp, seed)
        else:
            shape = place.whole_shape(tp)
            scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
            scale = embedding_scale if name == EMBEDDING else scale
            if place.fp8 is not None:
                place.fp8.scales.fill_(scale / _FP8_STD)
                if place.fp8.input_scale is not None:
                    place.fp8.input_scale.fill_(_FP8_INPUT_SCALE)
                scale = _FP8_STD
            key = f"{seed}/{name}"
            if _EXPERT.search(name):
                start = _hash_key(key) % len(shared)
                normal = torch.cat((shared[start:], shared[:start]))
            else:
                normal = _draw_normal(_count_block(place, tp), key)
            _fill_normal(place, tp, scale, normal)
        bar.update(place.memory.nbytes)


def _fill_mxfp4(name: str, place: WeightDestination, tp: TensorParallel, seed: int) -> None:
    """Fill in random codes, or scales with which they have about the variance of a matrix."""
    if name.endswith(MXFP4_SCALES):
        std = (place.whole_shape(tp)[-1] * MX_BLOCK) ** -0.5
        place.memory.fill_(127 + round(math.log2(std / _MXFP4_STD)))
        return
    block = torch.empty(_count_block(place, tp), dtype=torch.uint8)
    block.random_(0, 256, generator=_make_generator(f"{seed}/{name}"))
    _fill_repeatedly(place, tp, block)


def _fill_normal(
    place: WeightDestination, tp: TensorParallel, std: float, normal: torch.Tensor
) -> None:
    """Fill in ``normal``, float32 numbers with a deviation of 1, times ``std``."""
    dtype, block = place.memory.dtype, normal * std
    _fill_repeatedly(place, tp, convert_saturated(block) if dtype == FP8 else block.to(dtype))


def _count_block(place: WeightDestination, tp: TensorParallel) -> int:
    """Count the numbers to draw for a tensor."""
    return min(math.prod(place.whole_shape(tp)), _DUMMY_BLOCK)


def _draw_normal(count: int, key: str) -> torch.Tensor:
    """Draw float32 numbers with a deviation of 1 that depend on ``key`` alone."""
    return torch.empty(count).normal_(generator=_make_generator(key))


def _make_generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(_hash_key(key))


def _hash_key(key: str) -> int:
    """Return 63 bits that depend on ``key`` alone."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def _fill_repeatedly(place: WeightDestination, tp: TensorParallel, block: torch.Tensor) -> None:
    """Fill a rank's part of a tensor that consists of an endless repetition of ``block``."""
    memory, (_, *columns) = place.memory, place.whole_shape(tp)
    width, block = math.prod(columns), block.to(memory.device)
    mine, *inner = place.slice_part(tp)
    if not place.split and memory.is_contiguous():
        _repeat_block(block, mine.start * width, memory.view(-1))
        return
    # The numbers of a rank are not adjacent, so we make some whole rows at a time.
    step = -(-len(block) // width)
    scratch = memory.new_empty(min(step, len(memory)), *columns)
    for first in range(0, len(memory), step):
        some = scratch[: min(step, len(memory) - first)]
        _repeat_block(block, (mine.start + first) * width, some.view(-1))
        memory[first : first + step] = some[:, *inner]


def _repeat_block(block: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill ``out`` with an endless repetition of ``block``, starting at number ``start``."""
    done = 0
    while done < len(out):
        piece = block[(start + done) % len(block) :][: len(out) - done]
        out[done : done + len(piece)] = piece
        done += len(piece)
