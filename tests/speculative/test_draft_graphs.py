"""A draft model whose passes are CUDA graphs drafts what it drafts without: on a GPU, or on the
CPU, where a graph computes again what was captured, with attention that looks like a graph's."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tiny import VOCAB_SIZE, tiny_model

from pd.core.config import NodeConfig
from pd.core.node_info import KVLayout
from pd.core.sampling_params import SamplingParams
from pd.engine import draft_model, engine, step_graphs
from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.draft_model import DraftModel
from pd.engine.footprint import ExtraMemory, Footprint
from pd.engine.forward_item import ForwardItem
from pd.engine.kv_pool import KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.sampler import Sampler
from pd.engine.sampling_state import SamplingState
from pd.engine.step_graphs import capture_drafting, capture_steps
from pd.kernels.attention import AttentionBatch, find_attention_backend
from pd.kernels.attention.base import (
    AttentionBackend,
    DecodeAttention,
    MixedAttention,
    PlannedAttention,
    VerifyAttention,
)
from pd.kernels.attention.page_tables import extend_array
from pd.kernels.attention.torch_backend import TorchAttention
from pd.models.config_reader import read_model_config
from pd.models.loader import load_model
from pd.scheduling.request import Request, Sequence
from pd.speculative.draft_model import ModelDrafter
from pd.speculative.drafter import DraftRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf

    from pd.kernels.attention.base import LatentShape, PagedKV
    from pd.models.causal_lm import CausalLM

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
DRAFTED = 4
SIZES = (1, 2, 4)
# Larger steps than these are launched kernel by kernel.
MIXED = (16, 64)
CONTEXT = 512

PARAMS = [
    SamplingParams(max_tokens=400, temperature=0.0),
    SamplingParams(max_tokens=400, temperature=1.0),
    SamplingParams(max_tokens=400, temperature=0.8, top_p=0.9, frequency_penalty=0.8),
    SamplingParams(max_tokens=400, temperature=0.9, logprobs=True, top_logprobs=2),
]


class _Again:
    """A graph without a GPU."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self._compute()


class _RecorderWithoutGpu:
    """Has ``replay`` compute again what was recorded, which leaves its result where it was."""

    def capture_graph(self, compute: Callable[[], torch.Tensor]) -> tuple[_Again, torch.Tensor]:
        return _Again(compute), compute()


class _Rows(PlannedAttention):
    """Attention of a fixed number of rows on a CPU: those that are left over are sequences of one
    token in the pool's extra page."""

    def __init__(self, pool: PagedKV, num_heads: int, rows: int) -> None:
        self.pool, self._rows = pool, rows
        self._attention = TorchAttention(pool, num_heads)
        none = np.zeros(0, np.int64)
        self._fill(none, none, [])

    def _fill(self, starts: np.ndarray, lengths: np.ndarray, pages: SequenceOf[np.ndarray]) -> None:
        missing = self._rows - int(lengths.sum())
        extra = np.array([self.pool.num_pages], np.int32)
        starts, lengths = extend_array(starts, missing, 0), extend_array(lengths, missing, 1)
        self._attention.plan(AttentionBatch(starts, lengths, [*pages, *[extra] * missing]))
        self.slots = self._attention.slots

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._attention.attend(layer, q, k, v, sinks)


class _Decode(_Rows, DecodeAttention):
    def plan(self, starts: np.ndarray, pages: SequenceOf[np.ndarray]) -> None:
        self._fill(starts, np.ones_like(starts), pages)


class _Verify(_Rows, VerifyAttention):
    def plan(
        self,
        starts: np.ndarray,
        lengths: np.ndarray,
        pages: SequenceOf[np.ndarray],
        trees: Any = None,
        unread: Any = None,
    ) -> None:
        assert trees is None and unread is None, "drafts are chains"
        self._fill(starts, lengths, pages)


class _Mixed(_Rows, MixedAttention):
    def plan(self, starts: np.ndarray, lengths: np.ndarray, pages: SequenceOf[np.ndarray]) -> None:
        self._fill(starts, lengths, pages)


class _TorchRows(TorchAttention):
    """The plain backend with graphs."""

    def __init__(
        self,
        pool: PagedKV,
        num_heads: int,
        latent: LatentShape | None = None,
        windows: SequenceOf[int] = (),
    ) -> None:
        super().__init__(pool, num_heads, latent, windows)
        self._heads = num_heads

    def make_decode_graph(self, rows: int, max_context: int) -> DecodeAttention:
        return _Decode(self.pool, self._heads, rows)

    def make_verify_graph(self, rows: int, max_context: int) -> VerifyAttention:
        return _Verify(self.pool, self._heads, rows)

    def make_mixed_graph(
        self, tokens: int, singles: int, chunks: int, max_context: int
    ) -> MixedAttention:
        return _Mixed(self.pool, self._heads, tokens)


def attention() -> type[AttentionBackend]:
    """A backend with graphs."""
    if ON_GPU:
        return find_attention_backend("triton", torch.device(DEVICE), torch.float32, 8)
    return _TorchRows


def recorder() -> Any:
    return GraphRecorder(torch.device(DEVICE)) if ON_GPU else _RecorderWithoutGpu()


def config(**settings: Any) -> NodeConfig:
    return NodeConfig(
        role="decode",
        model=tiny_model(),
        load_format="dummy",
        speculative_algorithm="draft",
        speculative_draft_model=tiny_model(),
        speculative_num_draft_tokens=DRAFTED,
        **{"device": DEVICE, "dtype": "float32", "max_running_requests": 32} | settings,
    )


@functools.cache
def model() -> CausalLM:
    path = tiny_model()
    own = read_model_config(path)
    return load_model(path, own, dtype=torch.float32, device=DEVICE, load_format="dummy", seed=0)


def make_runner(page_size: int) -> ModelRunner:
    own = model().config
    layout = KVLayout.of_model(own.num_layers, own.num_kv_heads, own.head_dim, "float32", page_size)
    pool = KVPool(layout, 16384 // page_size, DEVICE)
    return ModelRunner.build(model(), pool, attention(), prompts=False)


@dataclass
class _Stream:
    """The same sequence for two drafters; ``states`` are those that their samplers count for."""

    sequences: list[Sequence]
    states: list[SamplingState]

    @classmethod
    def of(cls, prompt: np.ndarray, params: SamplingParams, seed: int) -> _Stream:
        sequences, states = [], []
        for _ in range(2):
            request = Request(rid="", room=b"", proxy=b"", prompt=prompt, params=params)
            sequences.append(Sequence(request, 0, prompt, len(prompt)))
            states.append(SamplingState(params, prompt, (), VOCAB_SIZE, seed=seed))
        return cls(sequences, states)

    def append(self, tokens: list[int]) -> None:
        for sequence, state in zip(self.sequences, self.states, strict=True):
            for token in tokens:
                sequence.append_token(token)
                state.observe_token(token)


@dataclass
class _Drafters:
    """One that launches its passes kernel by kernel, and one with graphs; ``used`` counts how the
    latter computed its passes. ``waits`` is torch's mode for what waits for a GPU meanwhile."""

    page_size: int
    used: Counter[str] = field(default_factory=Counter)
    waits: str = "default"

    def __post_init__(self) -> None:
        plain, captured = (make_runner(self.page_size) for _ in range(2))
        found = capture_drafting(captured, recorder(), config(), SIZES, CONTEXT, progress=False)
        assert found is not None
        captured.graphs, captured.verify_graphs, captured.mixed_graphs = found
        for name, graphs in zip(found._fields, found, strict=True):
            assert graphs is not None
            graphs.run = self._noted(name, graphs.run)  # type: ignore[method-assign]
        captured._launch_kernels = self._noted("launched", captured._launch_kernels)  # type: ignore[method-assign]
        device = torch.device(DEVICE)
        self._both = [
            ModelDrafter(runner, Sampler(VOCAB_SIZE, device)) for runner in (plain, captured)
        ]

    def _noted(self, name: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.used[name] += 1
            return run(*args, **kwargs)

        return note

    def expect(self, streams: list[_Stream]) -> None:
        """Have both compute the prompts before anything is drafted."""
        for number, drafter in enumerate(self._both):
            for stream in streams:
                drafter.expect_sequence(stream.sequences[number])
            while drafter.catch_up():
                pass

    def draft(self, streams: list[_Stream], limits: list[int]) -> list[list[int]]:
        """Draft by both, and return the drafts if they are equal."""
        found = []
        for number, drafter in enumerate(self._both):
            requests = [
                DraftRequest(stream.sequences[number], stream.states[number], limit)
                for stream, limit in zip(streams, limits, strict=True)
            ]
            drafter.begin_step([])
            if ON_GPU:
                torch.cuda.set_sync_debug_mode(self.waits)
            try:
                drafts = drafter.draft_tokens(requests, 0)
            finally:
                if ON_GPU:
                    torch.cuda.set_sync_debug_mode("default")
            for draft in drafts:
                assert draft is not None
                draft.batch.host = draft.batch.tokens.cpu().numpy().astype(np.int32)
            found.append([draft.tokens.tolist() for draft in drafts if draft is not None])
        assert found[0] == found[1]
        assert [len(tokens) for tokens in found[0]] == limits
        return found[0]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_drafts_in_graphs_are_those_without(
    monkeypatch: pytest.MonkeyPatch, page_size: int, seed: int
) -> None:
    """Batches change with every step, from one stream to more than the largest graph has; streams
    lack one token, two, or those of several steps without drafts, and are greedy or drawn."""
    monkeypatch.setattr(step_graphs, "MIXED_SIZES", MIXED)
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    drafters = _Drafters(page_size)

    def tokens(count: int) -> np.ndarray:
        return random.integers(0, VOCAB_SIZE - 2, count).astype(np.int32)

    lengths = [3, 17, 50, 64, 1, 30, 9, 120, 2, 5, 7]
    streams = [
        _Stream.of(tokens(length), PARAMS[number % len(PARAMS)], number)
        for number, length in enumerate(lengths)
    ]
    drafters.expect(streams[:-1])
    for stream in streams:
        stream.append(tokens(1).tolist())
    accepted = 0
    for size in [11, 1, 1, 3, 4, 5, 2, 11, 7, 8, 9, 1, 6, 3, 10, 2]:
        chosen = [streams[i] for i in random.permutation(len(streams))[:size]]
        limits = random.integers(1, DRAFTED + 1, size).tolist()
        for stream, draft in zip(chosen, drafters.draft(chosen, limits), strict=True):
            right = int(random.integers(0, len(draft) + 1))
            accepted += right
            stream.append([*draft[:right], *tokens(1).tolist()])
        for stream in streams:
            if random.random() < 0.2:  # a step in which nothing was drafted for it
                stream.append(tokens(3).tolist())
    print(dict(drafters.used))
    assert accepted > 50
    assert all(drafters.used[kind] for kind in ("decode", "verify", "mixed", "launched"))


def test_a_sequence_whose_last_token_was_drafted_is_drafted_for() -> None:
    """It has fewer tokens of the draft than are right, as where acceptance is simulated."""
    drafters = _Drafters(4)
    stream = _Stream.of(np.arange(5, 12, dtype=np.int32), PARAMS[0], 0)
    for accepted in (1, 2, 3, 4):
        (draft,) = drafters.draft([stream], [DRAFTED])
        stream.append(draft[:accepted])
    drafters.draft([stream], [DRAFTED])


def test_passes_that_no_graph_fits_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than any graph has, and then a batch for which there is one."""
    monkeypatch.setattr(step_graphs, "MIXED_SIZES", MIXED)
    drafters = _Drafters(16)
    prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE - 2, (70, 6)).astype(np.int32)
    streams = [_Stream.of(prompt, PARAMS[1], n) for n, prompt in enumerate(prompts)]
    drafters.draft(streams, [2] * 70)
    assert drafters.used == {"launched": 2}
    for stream in streams:
        stream.append([5])
    drafters.draft(streams[:4], [3] * 4)
    assert drafters.used["launched"] == 2
    assert drafters.used["decode"] >= 2


def test_newcomers_without_drafts_stay_in_the_graphs_of_the_others() -> None:
    """They came with their KV, or nothing matches what they say, so they have one token only."""
    plain, captured = (make_runner(4) for _ in range(2))
    found = capture_steps(captured, recorder(), config(), SIZES, CONTEXT, progress=False)
    captured.graphs, captured.verify_graphs, captured.mixed_graphs = found
    random = np.random.default_rng(0)
    before = captured.num_replays
    for step, lengths in enumerate([[5, 5, 1], [1, 3, 5, 1], [1, 1, 2], [1, 1, 1], [5]]):
        items, page = [], 0
        for length in lengths:
            start = int(random.integers(0, 20))
            count = -(-(start + length) // 4)
            tokens = random.integers(0, VOCAB_SIZE - 2, length).astype(np.int32)
            pages = np.arange(page, page + count, dtype=np.int32)
            items.append(ForwardItem(tokens, start, pages, length))
            page += count
        logits = [runner.forward(items).clone() for runner in (plain, captured)]
        torch.testing.assert_close(*logits, rtol=2e-5, atol=2e-5)
        assert captured.num_replays == before + step + 1
    assert not plain.num_replays


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_drafting_does_not_wait_for_the_gpu() -> None:
    """Torch raises where an operation would wait."""
    drafters = _Drafters(16)
    prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE - 2, (4, 20)).astype(np.int32)
    streams = [_Stream.of(prompt, PARAMS[n % 2], n) for n, prompt in enumerate(prompts)]
    for _ in range(3):  # compiles and allocates
        for stream, draft in zip(streams, drafters.draft(streams, [4] * 4), strict=True):
            stream.append([*draft, 5])
    drafters.waits = "error"
    drafters.draft(streams, [4] * 4)


def test_a_backend_without_graphs_has_none() -> None:
    pool = make_runner(16).pool
    runner = ModelRunner.build(model(), pool, TorchAttention, prompts=False)
    assert capture_drafting(runner, recorder(), config(), SIZES, CONTEXT) is None


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have draft models capture graphs, which take 12,345 bytes, wherever this runs."""
    monkeypatch.setattr(step_graphs, "MIXED_SIZES", MIXED)
    monkeypatch.setattr(draft_model, "measure_draft_memory", lambda *_: 12_345)
    monkeypatch.setattr(draft_model, "GraphRecorder", lambda _: recorder())
    monkeypatch.setattr(draft_model, "find_attention_backend", lambda *_, **__: attention())
    gpu = torch.device("cuda")
    sizes = draft_model.choose_graph_sizes
    monkeypatch.setattr(draft_model, "choose_graph_sizes", lambda config, _: sizes(config, gpu))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("given", "decode", "verify"),
    [
        (None, [1, 2, 4, 8, 16, 24, 32], list(step_graphs.choose_verify_sizes(64))),
        ((1, 3), [1, 3], [2, 3, 4, 5, 6]),
        ((0,), [], []),
    ],
    ids=["by default", "some", "none"],
)
def test_a_node_captures_what_its_flag_says(
    given: tuple[int, ...] | None, decode: list[int], verify: list[int]
) -> None:
    found = DraftModel.load(config(cuda_graph_batch_sizes=given), tiny_model())
    runner = found.make_runner(40)
    kinds = (runner.graphs, runner.verify_graphs, runner.mixed_graphs)
    sizes = [[] if graphs is None else graphs.sizes for graphs in kinds]
    assert sizes == [decode, verify, list(MIXED) if decode else []]
    assert runner.pool.num_pages == 40
    assert runner.chunk_graphs is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("context", "longest"), [(None, CONTEXT), (100, 100 + DRAFTED)])
def test_graphs_are_for_the_longest_sequence_of_the_node(context: int | None, longest: int) -> None:
    small = tiny_model(max_position_embeddings=CONTEXT)
    found = DraftModel.load(config(context_length=context), small)
    assert found.max_context == longest


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_nodes_pool_leaves_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the pages of the draft model's KV, and for its graphs."""
    settings = config(device="cpu")
    beside = DraftModel.load(settings, tiny_model()).memory
    page = 2 * 2 * 2 * 8 * 4 * settings.page_size
    assert beside == ExtraMemory(page, 12_345)
    asked = []

    def num_pages(
        _: Any, page_bytes: int, device: torch.device, needs: Footprint, tables: int
    ) -> int:
        asked.append((page_bytes, needs))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * page_bytes, 1 << 20))
        gpu = replace(settings, mem_fraction=1.0)
        return sized(gpu, page_bytes, torch.device("cuda"), needs, tables)

    sized = engine._choose_num_pages
    monkeypatch.setattr(engine, "_choose_num_pages", num_pages)
    built = engine.Engine.build(settings, beside)
    assert asked == [(2 * page, Footprint(0, 12_345))]
    assert built.pool.num_pages == (100 * 2 * page - 12_345) // (2 * page)
