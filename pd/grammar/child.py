"""A process that compiles grammars, so that one which takes too much ends it and nothing else.

Frames on standard input and output are a length of four bytes, big-endian, and MessagePack. The
first frame describes the vocabulary and is answered by the bytes of its tokens, as xgrammar's JSON.
Each that follows asks to compile.
"""

from __future__ import annotations

import math
import os
import resource
import struct
import sys
import time
from typing import IO, TYPE_CHECKING

import msgspec

from pd.core.children import ignore_ending_signals
from pd.grammar import stand_ins

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class CompileJob(msgspec.Struct, frozen=True):
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
    """The outcome of a job.

    Attributes:
        compiled: the compiled grammar as JSON of xgrammar; empty where that would take longer than
            to compile it again.
        is_silent: xgrammar had nothing to say about it. Other grammars are not compiled again: what
            it says of them is somebody else's text and does not belong into a node's log.
        error: what is wrong.
        steps: to the schema in a structural tag with which it is; see
            :class:`pd.grammar.json_schemas.WrongSchemaError`.
        cpu_seconds: processor time that compiling took.
        lacked_memory: the process may keep some of what the job took.
    """

    compiled: bytes = b""
    is_silent: bool = False
    error: str = ""
    steps: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    lacked_memory: bool = False


# Processor time up to which compiling again is no slower than JSON of what was compiled.
_QUICK_SECONDS = 0.1
# Processor time of the grammars whose parts a process remembers. What it compiles quickly may take
# a node as much longer, whose own compiler may not remember them.
_REMEMBERED_SECONDS = 1.0
# Argument of a process that has no stand-ins.
_ALL_IMPORTS = "--all-imports"
_VOCABULARY, _JOB = msgspec.msgpack.Decoder(Vocabulary), msgspec.msgpack.Decoder(CompileJob)


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
    """Serve until standard input ends, whatever signals all processes of the node get."""
    ignore_ending_signals()
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    _import_xgrammar()
    os.dup2(2, 1)  # what libraries print is no frame
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from pd.grammar.probe import long_tokens
    from pd.grammar.xgrammar_library import Compiler, dump_info, tokenizer_info

    info = tokenizer_info(_VOCABULARY.decode(read_frame(requests)))
    compiler = Compiler(info)
    send_frame(results, dump_info(info))
    os.dup2(os.memfd_create("said"), 2)
    os.dup2(2, 1)
    tokens = long_tokens(info.decoded_vocab)
    idle_bytes, remembered = _data_bytes(), 0.0
    while True:
        try:
            frame = read_frame(requests)
        except EOFError:
            return
        job = _JOB.decode(frame)
        _limit(job, idle_bytes)
        began = time.process_time()
        result = _compile(compiler, job, tokens)
        remembered += time.process_time() - began
        if remembered > _REMEMBERED_SECONDS:
            compiler.forget()
            remembered = 0.0
        send_frame(results, msgspec.msgpack.encode(result))


def _import_xgrammar() -> None:
    """With stand-ins; an xgrammar that does not do with them is imported anew, by a process that
    has read nothing of its input yet."""
    if _ALL_IMPORTS in sys.argv:
        return
    stand_ins.install()
    try:
        import pd.grammar.xgrammar_library  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever it misses
        print(f"xgrammar is imported with torch and transformers: {error!r}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-m", "pd.grammar.child", _ALL_IMPORTS])


def _compile(compiler: Compiler, job: CompileJob, tokens: Sequence[bytes]) -> Result:
    from pd.grammar.json_schemas import WrongSchemaError
    from pd.grammar.probe import slow_output
    from pd.grammar.xgrammar_library import dump_compiled

    began = time.process_time()
    try:
        compiled = compiler.compile(job.kind, job.text)
        took, is_silent = time.process_time() - began, _was_silent()
        if (slow := slow_output(compiled, tokens)) is not None:
            return Result(error=slow)
        size, dumped = int(compiled.memory_size_bytes), b""
        # NOTE: whether a grammar is refused must not depend on how fast this machine is.
        if (took > _QUICK_SECONDS or not is_silent) and size <= job.max_bytes:
            dumped = dump_compiled(compiled)
            if len(dumped) > job.max_bytes:
                size, dumped = (size, b"") if is_silent else (len(dumped), dumped)
    except MemoryError:
        limit = f"{job.memory_bytes >> 20} MiB (--grammar-memory)"
        return Result(error=f"it takes more than {limit} to compile", lacked_memory=True)
    except ValueError as error:
        _was_silent()
        steps = error.steps if isinstance(error, WrongSchemaError) else ()
        return Result(error=str(error), steps=steps)
    if size > job.max_bytes:
        sizes = f"{size >> 10} KiB; at most {job.max_bytes >> 10} are accepted"
        return Result(error=f"compiled it has {sizes}")
    return Result(dumped, is_silent=is_silent, cpu_seconds=took)


def _was_silent() -> bool:
    """Whether libraries have printed nothing since this was asked last."""
    if os.lseek(2, 0, os.SEEK_CUR) == 0:
        return True
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return False


def _limit(job: CompileJob, idle_bytes: int) -> None:
    """Have the kernel end this process if the job takes more than it may, on top of what earlier
    ones left."""
    from pd.grammar.xgrammar_library import CACHE_BYTES

    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime + job.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    most = job.memory_bytes + min(_data_bytes(), idle_bytes + CACHE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """Return the bytes that count for RLIMIT_DATA at present."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
