"""`jsonl`: one request per line, with the names that files for other harnesses use.

A line has one of ``prompt``, ``text``, ``input_ids``, ``prompt_token_ids`` or ``messages``, or a
``body`` with one of them (a line of OpenAI's batch files). ``max_tokens``, ``output_tokens``,
``output_length`` or ``output_len`` is the length of the answer, by default ``--random-output-len``.
``timestamp`` (milliseconds) is the request's arrival; either all lines have it or none.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from pd.bench.load.datasets.spec import Drawn
from pd.bench.load.workload import Turn
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.bench.load.datasets.spec import DatasetSpec
    from pd.bench.load.workload import Prompt

logger = logging.getLogger(__name__)

_PROMPTS = ("prompt", "text", "input_ids", "prompt_token_ids", "messages")
_LENGTHS = ("max_tokens", "max_completion_tokens", "output_tokens", "output_length", "output_len")
_LEFT_OUT = {*_PROMPTS, *_LENGTHS, "timestamp", "body", "model", "stream", "stream_options"}


def draw_jsonl(spec: DatasetSpec, seed: int) -> Drawn:
    """Read the requests of a file, in order. Raises UsageError for an invalid line, and for a file
    without any."""
    assert spec.path is not None
    sessions: list[tuple[Turn, ...]] = []
    times: list[float] = []
    for where, row in read_rows(spec.path):
        if spec.count is not None and len(sessions) == spec.count:
            break
        sessions.append((_make_turn(where, row, spec.output_len),))
        if "timestamp" in row:
            times.append(_read_number(where, row, "timestamp") / 1e3)
    if not sessions:
        raise UsageError(f"{spec.path} has no requests: all its lines are blank")
    if times and len(times) != len(sessions):
        raise UsageError(f"{spec.path}: {len(times)} of {len(sessions)} lines have a timestamp")
    return Drawn(sessions, [at - min(times) for at in times] or None)


def draw_last_lines(spec: DatasetSpec, count: int, measured: int) -> Drawn:
    """Read the last lines of a file, whose first ``measured`` lines are those of the run.

    The notes count lines that are both, because a prefix cache has their prompts in the run.
    """
    assert spec.path is not None
    last: deque[tuple[str, dict[str, Any]]] = deque(maxlen=count)
    lines = 0
    for row in read_rows(spec.path):
        last.append(row)
        lines += 1
    both = measured + len(last) - lines
    notes = {"warm_up_lines_that_are_measured": both} if both > 0 else {}
    return Drawn([(_make_turn(where, row, spec.output_len),) for where, row in last], None, notes)


def read_rows(path: Path, *, is_recorded: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with its place. Raises UsageError.

    ``is_recorded``: the file was written while something ran, so lines may be torn, for instance
    because a disk was full. We skip lines that are not JSON, and log one warning with their number.
    """
    torn: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    if not is_recorded:
                        raise UsageError(f"{path}:{number} is not JSON: {error}") from None
                    torn.append(number)
                    continue
                if not isinstance(value, dict):
                    shown = line.strip()[:60]
                    raise UsageError(f"{path}:{number} must be a JSON object, not {shown}")
                yield f"{path}:{number}", value
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if torn:
        what = "1 line is" if len(torn) == 1 else f"{len(torn)} lines are"
        logger.warning("%s: %s not JSON and skipped, line %d first", path, what, torn[0])


def _read_number(where: str, row: dict[str, Any], name: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise UsageError(f"{where}: {name} must be a number of at least 0, not {value!r:.60}")
    return float(value)


def _make_turn(where: str, row: dict[str, Any], output_len: int) -> Turn:
    body = row.get("body", row)
    if not isinstance(body, dict):
        raise UsageError(f"{where}: body must be a JSON object, not {body!r:.60}")
    given = [name for name in _PROMPTS if name in body]
    if len(given) != 1:
        raise UsageError(f"{where} must have one of {', '.join(_PROMPTS)}, not {given or 'none'}")
    prompt = _read_prompt(where, given[0], body[given[0]])
    lengths = [int(_read_number(where, body, name)) for name in _LENGTHS if name in body]
    num_tokens = len(prompt) if isinstance(prompt, list) and given[0] != "messages" else 0
    extra = {name: value for name, value in body.items() if name not in _LEFT_OUT}
    return Turn(prompt, num_tokens, max(1, lengths[0]) if lengths else output_len, extra=extra)


def _read_prompt(where: str, name: str, value: Any) -> Prompt:
    if name == "messages":
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return value
        raise UsageError(f"{where}: messages must be a list of objects, not {value!r:.60}")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    raise UsageError(f"{where}: {name} must be text or a list of token ids, not {value!r:.60}")
