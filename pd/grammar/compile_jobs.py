"""Messages between a node and its compiling processes (:mod:`pd.grammar.child`).

A frame is a length of four bytes, big-endian, followed by MessagePack. The node's first frame is a
:class:`Vocabulary`. The process answers it with the bytes of all tokens, as xgrammar's JSON. Each
later frame is a :class:`CompileJob`, answered with a :class:`Result`.
"""

from __future__ import annotations

import struct
from typing import IO

import msgspec

_LENGTH = struct.Struct(">I")


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model.

    Attributes:
        tokenizer: path of ``tokenizer.json``.
        size: number of logits, at least the number of the tokenizer's tokens.
        stop_ids: tokens at which an output ends.
    """

    tokenizer: str
    size: int
    stop_ids: list[int]


class CompileJob(msgspec.Struct, frozen=True):
    """A grammar to compile.

    Attributes:
        kind, text: see :class:`pd.core.grammar.Grammar`.
        cpu_seconds: processor time after which the kernel ends the process.
        memory_bytes: limit on memory for compiling.
        max_bytes: limit on the size of the result.
        is_tried: measure the cost of some outputs, too.
    """

    kind: str
    text: str
    cpu_seconds: float
    memory_bytes: int
    max_bytes: int
    is_tried: bool = True


class Result(msgspec.Struct, frozen=True):
    """The outcome of a job.

    Attributes:
        compiled: the compiled grammar as xgrammar's JSON; empty if compiling again is faster.
        is_silent: xgrammar printed nothing. The node compiles no other grammars itself, because
            xgrammar would print parts of the client's text into the node's log.
        error: reason of the failure, or empty.
        is_costly: the grammar is correct but exceeds a limit.
        steps: path to the wrong schema in a structural tag; see
            :class:`pd.structured.schema_rewriting.WrongSchemaError`.
        cpu_seconds: processor time of compiling.
        mask_seconds: processor time of the slowest measured mask; None without measurements.
        lacked_memory: the job ran out of memory, so the process may still hold some of it.
    """

    compiled: bytes = b""
    is_silent: bool = False
    error: str = ""
    is_costly: bool = False
    steps: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    mask_seconds: float | None = None
    lacked_memory: bool = False


def send_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Read a frame. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    frame = stream.read(length)
    if len(frame) < length:
        raise EOFError
    return frame
