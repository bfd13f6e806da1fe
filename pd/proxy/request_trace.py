"""A file with a row for every prompt that was served (``--trace-requests``), to replay the load."""

from __future__ import annotations

import json
import logging
import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

from pd.core.errors import UsageError
from pd.core.seldom import Seldom
from pd.radix.prefix_hashes import first_hash, page_hashes

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from pd.proxy.generation import Generation

logger = logging.getLogger(__name__)

# Tokens for which a row has one hash, as in Mooncake's traces.
BLOCK_TOKENS = 512
_TOKEN_BYTES = 4
# Bits that are left out of a hash of 64, so that every reader of JSON takes it as it is.
_SPARE_BITS = 11
# Prompts that wait to be written at most, and their tokens; where the disk is slower, rows are
# lost.
_MOST_ROWS, _MOST_TOKENS = 4096, 16 << 20


def create_trace(path: Path) -> None:
    """Create the file. Raises UsageError if it cannot be, or is there with rows already."""
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
    """Appends rows on a thread of its own. Several processes may append to one file.

    A row is one of Mooncake's traces: ``timestamp`` (milliseconds from the proxy's start to the
    request's arrival), ``input_length``, ``output_length`` (tokens of the longest answer) and
    ``hash_ids``, a hash for each 512 tokens that stands for all tokens up to its end and for the
    ``cache_salt``. Rows are in the order in which requests ended. Neither text nor token ids are
    written, but a reader who knows the beginning of a prompt can tell whether a row has it.

    Args:
        began: when the proxy started, on the monotonic clock.
    """

    def __init__(self, path: Path, began: float) -> None:
        self._began = began
        self._file = path.open("ab", buffering=0)
        self._rows: queue.Queue[_Ended | None] = queue.Queue(_MOST_ROWS)
        self._lock = threading.Lock()
        self._tokens = 0
        self._seldom = Seldom(logger)
        self._thread = threading.Thread(target=self._write, name="request-trace", daemon=True)
        self._thread.start()

    def ended(self, generation: Generation) -> None:
        """Note a prompt whose request is over, with the answer as far as it came."""
        spec = generation.spec
        output = max(len(choice.output_ids) for choice in generation.choices)
        row = _Ended(generation.created, spec.token_ids, spec.namespace, output)
        with self._lock:
            is_full = self._rows.full() or self._tokens + len(spec.token_ids) > _MOST_TOKENS
            if not is_full:
                self._tokens += len(spec.token_ids)
        if is_full:
            self._seldom.warn("--trace-requests: rows are lost, the disk is slower than requests")
        else:
            self._rows.put_nowait(row)  # only this thread puts

    def close(self, timeout: float = 5.0) -> None:
        """Write what is left, for so many seconds at most."""
        try:
            self._rows.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _write(self) -> None:
        before = b""
        while (ended := self._rows.get()) is not None:
            line = before + json.dumps(self._row(ended)).encode() + b"\n"
            try:
                # One call, so that rows of several processes do not mix.
                written = self._file.write(line)
                # What there is of a row that is torn is a line of its own.
                before = b"" if written == len(line) else b"\n"
                if before:
                    raise OSError(0, "the disk took a part of it")
            except OSError as error:
                self._seldom.warn(f"--trace-requests: a row is lost: {error.strerror}")
            with self._lock:
                self._tokens -= len(ended.token_ids)
        self._file.close()

    def _row(self, ended: _Ended) -> dict[str, object]:
        data = ended.token_ids.astype("<i4", copy=False).tobytes()
        hashes = page_hashes(first_hash(ended.namespace), data, BLOCK_TOKENS * _TOKEN_BYTES)
        numbers = memoryview(hashes).cast("Q")
        return {
            "timestamp": max(0, round((ended.arrived - self._began) * 1e3)),
            "input_length": len(ended.token_ids),
            "output_length": ended.output,
            "hash_ids": [number >> _SPARE_BITS for number in numbers],
        }
