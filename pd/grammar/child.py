"""A process compiling grammars, so an expensive grammar ends only this process.

It exchanges the frames of :mod:`pd.grammar.compile_jobs` on standard input and output.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from pd.grammar import stand_ins
from pd.grammar.compile_jobs import CompileJob, Result, Vocabulary, read_frame, send_frame
from pd.util.children import ignore_ending_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd.grammar.xgrammar_library import Compiler

# Up to this processor time, compiling again is as fast as reading the compiled grammar's JSON.
_QUICK_SECONDS = 0.1
# We clear the compiler's cache after this much processor time. The node's compiler may lack the
# cached parts, so a grammar that is quick in here could take the node this much longer.
_CACHED_SECONDS = 1.0
# Argument of a process without stand-ins.
_ALL_IMPORTS = "--all-imports"
_VOCABULARY, _JOB = msgspec.msgpack.Decoder(Vocabulary), msgspec.msgpack.Decoder(CompileJob)


def main() -> None:
    """Serve until standard input ends. Ignore signals sent to all processes of the node."""
    ignore_ending_signals()
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    _import_xgrammar()
    os.dup2(2, 1)  # so that output of libraries does not mix with frames
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from pd.grammar.probe import choose_long_tokens
    from pd.grammar.xgrammar_library import Compiler, dump_info, read_tokenizer

    info = read_tokenizer(_VOCABULARY.decode(read_frame(requests)))
    compiler = Compiler(info)
    send_frame(results, dump_info(info))
    os.dup2(os.memfd_create("said"), 2)
    os.dup2(2, 1)
    tokens = choose_long_tokens(info.decoded_vocab)
    idle_bytes, cached_seconds = _read_data_bytes(), 0.0
    while True:
        try:
            frame = read_frame(requests)
        except EOFError:
            return
        job = _JOB.decode(frame)
        _limit_resources(job, idle_bytes)
        began = time.process_time()
        result = _run_job(compiler, job, tokens, info.decoded_vocab)
        cached_seconds += time.process_time() - began
        if cached_seconds > _CACHED_SECONDS:
            compiler.clear_cache()
            cached_seconds = 0.0
        send_frame(results, msgspec.msgpack.encode(result))


def _import_xgrammar() -> None:
    """Import xgrammar with stand-ins. If that fails, restart the process without them.

    Call this before you read standard input, because the new process reads it from the beginning.
    """
    if _ALL_IMPORTS in sys.argv:
        return
    stand_ins.install_stand_ins()
    try:
        import pd.grammar.xgrammar_library  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a missing attribute may raise anything
        with contextlib.suppress(OSError):  # the reader may have left
            message = "xgrammar does not work with stand-ins; importing torch and transformers"
            print(f"{message}: {error!r}", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-m", "pd.grammar.child", _ALL_IMPORTS])


def _run_job(
    compiler: Compiler, job: CompileJob, tokens: Sequence[bytes], vocabulary: Sequence[bytes]
) -> Result:
    from pd.engine.token_rules import explain_slow_masks
    from pd.grammar.probe import find_slow_output, find_slow_rule, time_masks
    from pd.grammar.xgrammar_library import dump_compiled
    from pd.structured.schema_rewriting import WrongSchemaError

    began = time.process_time()
    try:
        compiled = compiler.compile_text(job.kind, job.text)
        took, is_silent = time.process_time() - began, _was_silent()
        slow = mask_seconds = None
        if job.is_tried:
            slow = find_slow_output(compiled, tokens) or find_slow_rule(compiled, compiler)
        if job.is_tried and slow is None:
            mask_seconds = time_masks(compiled, vocabulary)
            slow = explain_slow_masks(mask_seconds)
        if slow is not None:
            return Result(error=slow, is_costly=True)
        size, dumped = int(compiled.memory_size_bytes), b""
        # NOTE: The speed of this machine must not decide whether we refuse a grammar.
        if (took > _QUICK_SECONDS or not is_silent) and size <= job.max_bytes:
            dumped = dump_compiled(compiled)
            if len(dumped) > job.max_bytes:
                size, dumped = (size, b"") if is_silent else (len(dumped), dumped)
    except MemoryError:
        limit = f"{job.memory_bytes >> 20} MiB (--grammar-memory)"
        error = f"compiling it takes more than {limit}"
        return Result(error=error, is_costly=True, lacked_memory=True)
    except ValueError as wrong:
        _was_silent()
        steps = wrong.steps if isinstance(wrong, WrongSchemaError) else ()
        return Result(error=str(wrong), steps=steps)
    if size > job.max_bytes:
        sizes = f"{size >> 10} KiB (limit {job.max_bytes >> 10} KiB)"
        return Result(error=f"compiled size: {sizes}; simplify it", is_costly=True)
    return Result(dumped, is_silent=is_silent, cpu_seconds=took, mask_seconds=mask_seconds)


def _was_silent() -> bool:
    """Return whether libraries have printed nothing since the last call."""
    if os.lseek(2, 0, os.SEEK_CUR) == 0:
        return True
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return False


def _limit_resources(job: CompileJob, idle_bytes: int) -> None:
    """Make the kernel end this process if the job exceeds its limits.

    Memory left over from earlier jobs comes on top.
    """
    from pd.grammar.xgrammar_library import CACHE_BYTES

    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(usage.ru_utime + usage.ru_stime + job.cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
    limit = job.memory_bytes + min(_read_data_bytes(), idle_bytes + CACHE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def _read_data_bytes() -> int:
    """Return the size that RLIMIT_DATA limits."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


if __name__ == "__main__":
    main()
