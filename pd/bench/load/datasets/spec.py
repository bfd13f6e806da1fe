"""Settings of the datasets, and how one of them is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.bench.load.text import words_of
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.load.workload import Prompt, Turn

NAMES = ("random", "shared-prefix", "multi-turn", "jsonl", "trace", "structured")


@dataclass(frozen=True)
class TraceSpec:
    """Settings of ``trace``; see :mod:`pd.bench.load.datasets.trace`."""

    length_scale: str = "1"
    output_scale: str | None = None
    time_scale: float = 1.0
    window: tuple[float, float] = (0.0, float("inf"))
    arrivals: str = "recorded"
    too_long: str = "drop"


@dataclass(frozen=True)
class DatasetSpec:
    """Settings of a dataset. Lengths in tokens, times in seconds.

    Attributes:
        name: one of :data:`NAMES`.
        count: sessions to draw; None: as many as the file has.
        range_ratio: lengths are uniform between ``(1 - r) * length`` and ``(1 + r) * length``, as
            in ``vllm bench serve``.
        as_text: prompts are words, not token ids.
        vocab_size: token ids are below this.
        context: longest prompt and answer together; None if nobody knows.
    """

    name: str = "random"
    path: Path | None = None
    count: int | None = None
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    num_prefixes: int = 8
    prefix_len: int = 512
    turns: int = 4
    turn_len: int = 64
    think_time: float = 0.0
    trace: TraceSpec = field(default_factory=TraceSpec)
    as_text: bool = False
    vocab_size: int = 2000
    context: int | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"--dataset-name is one of {', '.join(NAMES)}, not {self.name}")
        if not 0 <= self.range_ratio < 1:
            raise UsageError(f"--random-range-ratio is 0 to less than 1, not {self.range_ratio:g}")
        if self.name in ("jsonl", "trace") and self.path is None:
            raise UsageError(f"--dataset-name {self.name} needs --dataset-path FILE")
        smallest = min(self.input_len, self.output_len, self.vocab_size, self.turns, self.turn_len)
        if smallest < 1 or min(self.num_prefixes, self.prefix_len) < 1:
            raise UsageError("lengths, --turns, --num-prefixes and --vocab-size are at least 1")
        if self.count is not None and self.count < 1:
            raise UsageError(f"--num-prompts must be at least 1, not {self.count}")


@dataclass
class Drawn:
    """Sessions that were drawn from a dataset.

    Attributes:
        sessions: turns of each session.
        arrivals: times at which the sessions arrive, where the dataset says so.
        notes: what a reader of the results has to know, such as rows that were left out.
    """

    sessions: list[tuple[Turn, ...]]
    arrivals: list[float] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class RandomPrompts:
    """Random lengths and prompts of one dataset."""

    def __init__(self, spec: DatasetSpec, seed: int) -> None:
        self._spec = spec
        self.rng = np.random.default_rng([seed, 2])

    def length(self, mean: int) -> int:
        """A length around ``mean``, by ``range_ratio``; at least 1."""
        ratio = self._spec.range_ratio
        low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
        return max(1, int(self.rng.integers(low, high + 1)))

    def ids(self, count: int) -> list[int]:
        ids: list[int] = self.rng.integers(0, self._spec.vocab_size, count).tolist()
        return ids

    def prompt(self, ids: list[int]) -> Prompt:
        """The ids, or their words."""
        return words_of(ids) if self._spec.as_text else ids
