"""Settings of the datasets, and random prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd.bench.load.workload import Prompt, Turn

# Words for servers that tokenize. Most tokenizers have each of these as one token; the server's
# ``usage`` says how many tokens a prompt really had.
_COMMON_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how their
if will up other about out many then them these so some her would make like him into time has
look two more write go see number no way could people my than first water been call who oil its
now find long down day did get come made may part over new sound take only little work know
place year live me back give most very after thing our just name good man think say great where
help through much before line right too mean old any same tell boy follow came want show also
around form three small set put end does another well large must big even such because turn here
why ask went men read need land different home us move try kind hand picture again change off
play spell air away animal house point page letter mother answer found study still learn should
world high every near add food between own below country plant last school father keep tree
never start city earth eye light thought head under story saw left few while along might close
something seem next hard open example begin life always those both paper
"""
WORDS = _COMMON_WORDS.split()
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
        count: sessions to draw; None for all of a file.
        range_ratio: lengths are uniform between ``(1 - r) * length`` and ``(1 + r) * length``, as
            in ``vllm bench serve``.
        as_text: whether prompts are words instead of token ids.
        vocab_size: token ids are below this.
        context: most tokens of prompt and answer together; None if unknown.
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
    """Sessions drawn from a dataset.

    Attributes:
        sessions: turns of each session.
        arrivals: times at which the sessions arrive, if the dataset says so.
        notes: facts for readers of the results, such as the number of dropped rows.
    """

    sessions: list[tuple[Turn, ...]]
    arrivals: list[float] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class RandomPrompts:
    """Draws lengths and prompts of one dataset."""

    def __init__(self, spec: DatasetSpec, seed: int) -> None:
        self._spec = spec
        self.rng = np.random.default_rng([seed, 2])

    def draw_length(self, mean: int) -> int:
        """Draw a length around ``mean``, by ``range_ratio``; at least 1."""
        ratio = self._spec.range_ratio
        low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
        return max(1, int(self.rng.integers(low, high + 1)))

    def draw_ids(self, count: int) -> list[int]:
        ids: list[int] = self.rng.integers(0, self._spec.vocab_size, count).tolist()
        return ids

    def to_prompt(self, ids: list[int]) -> Prompt:
        """Return the ids, or their words."""
        return words_of(ids) if self._spec.as_text else ids


def words_of(ids: Sequence[int]) -> str:
    """Return a common English word per id. Equal ids make equal words, so prefixes stay shared."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
