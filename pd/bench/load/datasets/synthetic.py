"""Drawn prompts: `random`, `shared-prefix`, `multi-turn` and `structured`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd.bench.load.datasets.jsonl import read_rows
from pd.bench.load.datasets.spec import Drawn, RandomPrompts
from pd.bench.load.workload import Turn
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pd.bench.load.datasets.spec import DatasetSpec

DEFAULT_COUNT = 1000

# Schemas of `structured` without a file: flat, nested, and with a list.
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Lima", "Cairo"]},
            "at": {
                "type": "object",
                "properties": {"hour": {"type": "integer"}, "open": {"type": "boolean"}},
                "required": ["hour", "open"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "at"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
)


def draw_random(spec: DatasetSpec, seed: int) -> Drawn:
    """Draw unrelated prompts."""
    draw = RandomPrompts(spec, seed)
    return Drawn([(_draw_turn(spec, draw, []),) for _ in range(_session_count(spec))])


def draw_shared_prefix(spec: DatasetSpec, seed: int) -> Drawn:
    """Draw prompts that begin with one of a few prefixes."""
    draw = RandomPrompts(spec, seed)
    prefixes = [draw.draw_ids(spec.prefix_len) for _ in range(spec.num_prefixes)]
    chosen = draw.rng.integers(0, spec.num_prefixes, _session_count(spec))
    return Drawn([(_draw_turn(spec, draw, prefixes[number]),) for number in chosen])


def draw_multi_turn(spec: DatasetSpec, seed: int) -> Drawn:
    """Draw conversations. Later turns add ``turn_len`` tokens after a time to think."""
    draw = RandomPrompts(spec, seed)
    sessions = []
    for _ in range(_session_count(spec)):
        turns = [_draw_turn(spec, draw, [])]
        for _ in range(spec.turns - 1):
            ids = draw.draw_ids(draw.draw_length(spec.turn_len))
            num_out = draw.draw_length(spec.output_len)
            think_time = float(draw.rng.exponential(spec.think_time)) if spec.think_time else 0.0
            turns.append(Turn(draw.to_prompt(ids), len(ids), num_out, think_time))
        sessions.append(tuple(turns))
    return Drawn(sessions)


def draw_structured(spec: DatasetSpec, seed: int) -> Drawn:
    """Draw random prompts, each with a JSON schema for the answer."""
    schemas = SCHEMAS if spec.path is None else read_schemas(spec.path)
    draw = RandomPrompts(spec, seed)
    chosen = draw.rng.integers(0, len(schemas), _session_count(spec))
    return Drawn([(_draw_turn(spec, draw, [], schemas[n]),) for n in chosen])


def read_schemas(path: Path) -> tuple[dict[str, Any], ...]:
    """Read one schema per line. Raises UsageError for an invalid line."""
    schemas = tuple(row for _, row in read_rows(path))
    if not schemas:
        raise UsageError(f"{path} has no schema; write one per line")
    return schemas


def _session_count(spec: DatasetSpec) -> int:
    return DEFAULT_COUNT if spec.count is None else spec.count


def _draw_turn(
    spec: DatasetSpec, draw: RandomPrompts, prefix: list[int], schema: dict[str, Any] | None = None
) -> Turn:
    ids = prefix + draw.draw_ids(draw.draw_length(spec.input_len))
    return Turn(draw.to_prompt(ids), len(ids), draw.draw_length(spec.output_len), schema=schema)
