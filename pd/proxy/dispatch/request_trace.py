"""Writes a row for every prompt that was served (``--trace-requests``), to replay the load."""

from __future__ import annotations

import json
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import UsageError
from pd.radix.prefix_hashes import hash_namespace, hash_pages
from pd.util.call_thread import CallThread
from pd.util.warning_limit import WarningLimit

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from pd.proxy.dispatch.generation import Generation

logger = logging.getLogger(__name__)

# Tokens per hash, as in Mooncake's traces.
BLOCK_TOKENS = 512
_TOKEN_BYTES = 4
# Bits that we drop from a hash of 64 bits, so that every JSON parser reads it exactly.
_SPARE_BITS = 11
# Limits of rows that wait to be written, and of their tokens. We lose rows if the disk is slower.
_MOST_ROWS, _MOST_TOKENS = 4096, 16 << 20


def create_trace(path: Path) -> None:
    """Create the file. Raises UsageError if that fails, or if the file has rows already."""
    try:
        path.open("ab").close()
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"--trace-requests {path}: {error.strerror}") from None
    if size:
        raise UsageError(f"--trace-requests {path} has rows already; name a new file")


class _Ended(NamedTuple):
    arrived: float
    token_ids: npt.NDArray[np.int32]
    namespace: str
    output: int


class RequestTrace:
    """Appends rows on its own thread. Several processes may append to one file.

    Rows have the format of Mooncake's traces: ``timestamp`` (milliseconds from the start of the
    proxy to the arrival), ``input_length``, ``output_length`` (tokens of the longest answer) and
    ``hash_ids``: one hash per 512 tokens, which covers all tokens up to its end and the
    ``cache_salt``. Rows are in order of the ends of requests. We write neither text nor token ids,
    but a reader who knows the beginning of a prompt can find it.

    Args:
        began: when the proxy started, on the monotonic clock.
    """

    def __init__(self, path: Path, began: float) -> None:
        self._began = began
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        # Rows that wait to be written, and their tokens.
        self._rows = self._tokens = 0
        # The rest of a torn row becomes a line of its own.
        self._torn = False
        self._warnings = WarningLimit(logger)
        self._thread = CallThread("request-trace")
        self._thread.start()

    def add_prompt(self, generation: Generation) -> None:
        """Add a row for a prompt that is over, with the answer so far."""
        spec = generation.spec
        output = max(len(choice.output_ids) for choice in generation.choices)
        row = _Ended(generation.created, spec.token_ids, spec.namespace, output)
        with self._lock:
            tokens = self._tokens + len(spec.token_ids)
            is_full = self._rows >= _MOST_ROWS or tokens > _MOST_TOKENS
            if not is_full:
                self._rows, self._tokens = self._rows + 1, tokens
        if is_full:
            self._warnings.log_warning(
                "--trace-requests: rows are lost, the disk is slower than requests"
            )
        else:
            self._thread.post(partial(self._write, row))

    def close(self, timeout: float = 5.0) -> None:
        """Write the remaining rows, for at most ``timeout`` seconds."""
        self._thread.post(lambda: self._file.close())
        self._thread.close(timeout)

    def _write(self, ended: _Ended) -> None:
        line = b"\n" * self._torn + json.dumps(self._row(ended)).encode() + b"\n"
        try:
            # We write a row in one call, so that rows of several processes do not mix.
            self._torn = self._file.write(line) != len(line)
            if self._torn:
                raise OSError(0, "the disk took a part of it")
        except OSError as error:
            self._warnings.log_warning(f"--trace-requests: a row is lost: {error.strerror}")
        with self._lock:
            self._rows -= 1
            self._tokens -= len(ended.token_ids)

    def _row(self, ended: _Ended) -> dict[str, object]:
        data = ended.token_ids.astype("<i4", copy=False).tobytes()
        hashes = hash_pages(hash_namespace(ended.namespace), data, BLOCK_TOKENS * _TOKEN_BYTES)
        numbers = memoryview(hashes).cast("Q")
        return {
            "timestamp": max(0, round((ended.arrived - self._began) * 1e3)),
            "input_length": len(ended.token_ids),
            "output_length": ended.output,
            "hash_ids": [number >> _SPARE_BITS for number in numbers],
        }
