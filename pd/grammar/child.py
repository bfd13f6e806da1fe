"""A process that compiles grammars, so that one which takes too much ends it and nothing else.

Frames on standard input and output are a length of four bytes, big-endian, and MessagePack. The
first frame describes the vocabulary and is answered by "ready"; each that follows asks to compile.
"""

from __future__ import annotations

import math
import os
import resource
import struct
import sys
from typing import IO, TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pd.grammar.xgrammar_library import Compiler

_LENGTH = struct.Struct(">I")


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens that a model draws.

    Attributes:
        tokenizer: path of ``tokenizer.json``.
        size: number of logits, at least that of the tokenizer's tokens.
        stop_ids: tokens that end an output.
    """

    tokenizer: str
    size: int
    stop_ids: list[int]


class Job(msgspec.Struct, frozen=True):
    """A grammar to compile.

    Attributes:
        kind, text: see :class:`pd.core.grammar.Grammar`.
        cpu_seconds: processor time after which the process is ended.
        memory_bytes: memory that compiling may take.
        max_bytes: size of the result.
    """

    kind: str
    text: str
    cpu_seconds: float
    memory_bytes: int
    max_bytes: int


class Result(msgspec.Struct, frozen=True):
    """What became of a job: the compiled grammar as JSON of xgrammar, or what is wrong.

    Attributes:
        lacked_memory: the process may keep some of what the job took.
    """

    compiled: bytes = b""
    error: str = ""
    lacked_memory: bool = False


_VOCABULARY, _JOB = msgspec.msgpack.Decoder(Vocabulary), msgspec.msgpack.Decoder(Job)


def send_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    frame = stream.read(length)
    if len(frame) < length:
        raise EOFError
    return frame


def main() -> None:
    """Serve until standard input ends."""
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no frame
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = _VOCABULARY.decode(read_frame(requests))
    from pd.grammar.xgrammar_library import Compiler, tokenizer_info

    compiler = Compiler(tokenizer_info(vocabulary))
    send_frame(results, b"ready")
    # What a library says of a grammar is somebody else's text and does not belong into a log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    idle_bytes = _data_bytes()
    while True:
        try:
            frame = read_frame(requests)
        except EOFError:
            return
        job = _JOB.decode(frame)
        _limit(job, idle_bytes)
        send_frame(results, msgspec.msgpack.encode(_compile(compiler, job)))


def _compile(compiler: Compiler, job: Job) -> Result:
    try:
        compiled = compiler.compile(job.kind, job.text)
    except MemoryError:
        limit = f"{job.memory_bytes >> 20} MiB"
        return Result(error=f"it takes more than {limit} to compile", lacked_memory=True)
    except ValueError as error:
        return Result(error=str(error))
    if len(compiled) > job.max_bytes:
        sizes = f"{len(compiled) >> 20} MiB; at most {job.max_bytes >> 20} are accepted"
        return Result(error=f"compiled it has {sizes}")
    return Result(compiled)


def _limit(job: Job, idle_bytes: int) -> None:
    """Have the kernel end this process if the job takes more than it may."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime + job.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    most = idle_bytes + job.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """What counts for RLIMIT_DATA at present."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
