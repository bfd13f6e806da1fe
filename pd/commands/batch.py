"""``pd-launch batch``: answers the requests of a file into another file."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING

from pd.commands import parser as types
from pd.commands.proxy import API_KEY_VARIABLE
from pd.core.errors import PDError, UsageError
from pd.util.output import unwrap_stream
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from pd.batch.output import BatchOutput
    from pd.batch.requests import BatchInput
    from pd.batch.run import BatchCounts
    from pd.batch.server import BatchServer

TEXT = "send the requests of a file to a server and write their answers to another; resumable"
MAX_CONCURRENCY = 1024
# Exit status if the final answers of some requests are errors.
REFUSED_STATUS = 3
_SECONDS_BETWEEN_LINES = 30.0

_EXAMPLES = f"""\
examples:
  pd-launch batch requests.jsonl answers.jsonl --url http://127.0.0.1:8000
  zcat requests.jsonl.gz | pd-launch batch - answers.jsonl --url http://127.0.0.1:8000
  {API_KEY_VARIABLE}=secret pd-launch batch in.jsonl out.jsonl --url https://host --concurrency 256

a line of IN, as OpenAI's Batch API has it (one line, /v1/completions works too):
  {{"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions",
   "body": {{"messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 64}}}}

a line of OUT, in the order in which answers come:
  {{"id": "batch_req_…", "custom_id": "a-1", "error": null,
   "response": {{"status_code": 200, "request_id": "…", "body": {{"choices": […], …}}}}}}

The same command continues where an earlier one ended, however it ended. Requests with an answer in
OUT are not sent again. Those that failed (connection lost, 408, 429, 5xx) are sent again, and lose
their line in OUT at the start.

exit status: 0 all succeeded; 1 some failed, or the server is gone: run it again; 2 an argument or a
line is wrong, nothing was sent; 3 some were refused (such as with 400), the others succeeded; 130
interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s IN.jsonl OUT.jsonl --url URL [flags]"
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("input", metavar="IN", help="requests, one per line; - for standard input")
    add("output", metavar="OUT", help="file to add answers to; - for standard output")
    add("--url", required=True, metavar="URL", help="the proxy, such as http://127.0.0.1:8000")
    concurrency = "requests under way at a time"
    add("--concurrency", type=_parse_concurrency, default=64, metavar="N", help=concurrency)
    add(
        "--api-key",
        metavar="KEY",
        help=f"bearer token (default: ${API_KEY_VARIABLE}; other users of this machine "
        "cannot see it)",
    )
    timeout = "limit of one attempt at a request"
    add("--timeout", type=types.parse_seconds, default=600.0, metavar="SECONDS", help=timeout)
    add(
        "--max-retries",
        type=_parse_count,
        default=10,
        metavar="N",
        help="attempts at a request after the first, after 429, 5xx and lost connections, with "
        "growing pauses: four minutes in all with the default of 10",
    )


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"must be a number from 0 on, not {text}")
    return int(text)


def _parse_concurrency(text: str) -> int:
    number = _parse_count(text)
    if not 1 <= number <= MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_CONCURRENCY}, not {text}")
    return number


def run(args: argparse.Namespace) -> int:
    """Check the input, send unfinished requests, and report the outcome.

    Raises:
        UsageError: an argument, a line of the input or the output is invalid; nothing was sent.
        SetupError: the server is gone or rejects the API key, or the output cannot be written.
    """
    from pd.batch.output import open_output
    from pd.batch.requests import BatchInput
    from pd.batch.server import BatchServer

    api_key = os.environ.get(API_KEY_VARIABLE) if args.api_key is None else args.api_key
    server = BatchServer(args.url, api_key or None, args.timeout, args.concurrency)
    path = None if args.output == "-" else types.parse_path(args.output)
    source = BatchInput(None if args.input == "-" else types.parse_path(args.input))
    try:
        ids = source.check_lines()
        if (
            path is not None
            and path.exists()
            and os.path.samestat(os.fstat(source.fileno()), path.stat())
        ):
            raise UsageError(f"{path} is both input and output; name another file for the answers")
        output = open_output(path)
        try:
            return _send_requests(args, source, output, server, ids)
        finally:
            output.close()
    finally:
        source.close()


def _send_requests(
    args: argparse.Namespace,
    source: BatchInput,
    output: BatchOutput,
    server: BatchServer,
    ids: set[bytes],
) -> int:
    import asyncio

    from pd.batch.run import BatchCounts, BatchRun

    done = [has_succeeded for digest, has_succeeded in output.done.items() if digest in ids]
    counts = BatchCounts(len(ids), earlier=sum(done), refused=len(done) - sum(done))
    ids.clear()
    progress = _Progress(counts)

    async def run() -> bool:
        batch = BatchRun(
            source.read_requests(),
            output,
            server,
            counts,
            concurrency=args.concurrency,
            max_retries=args.max_retries,
            progress=progress.show_counts,
            report=progress.print_line,
        )
        try:
            await batch.run()
        finally:
            await server.close()
        return batch.interrupted

    at_start = dataclasses.replace(counts)
    try:
        interrupted = asyncio.run(run())
    except PDError:
        progress.close()
        if counts != at_start:
            _print_line(_summarize_counts(counts, output))
        raise
    progress.close()
    _print_line(_summarize_counts(counts, output))
    if interrupted and counts.done < counts.total:
        return 130
    if counts.done < counts.total:
        return 1
    return REFUSED_STATUS if counts.refused else 0


def _summarize_counts(counts: BatchCounts, output: BatchOutput) -> str:
    """Summarize all requests in one line."""
    succeeded = counts.earlier + counts.answered
    parts = [f"{succeeded} of {counts.total} requests succeeded"]
    if counts.earlier:
        parts[0] += f" ({counts.earlier} of them in earlier runs)"
    if counts.refused:
        parts.append(f"{counts.refused} {'was' if counts.refused == 1 else 'were'} refused")
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    left = counts.total - counts.done - counts.failed
    if left:
        parts.append(f"{left} {'has' if left == 1 else 'have'} no answer yet")
    text = f"{', '.join(parts)}; answers are in {output.name}"
    if counts.done < counts.total and output.is_resumable:
        text += "; the same command continues from here"
    return text


def _print_line(text: str) -> None:
    print(f"pd-launch batch: {escape_text(text)}", file=sys.stderr, flush=True)


class _Progress:
    """Shows a bar on a terminal after two seconds, elsewhere a line every 30 seconds."""

    def __init__(self, counts: BatchCounts) -> None:
        from tqdm import tqdm

        self._counts = counts
        self._last = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=counts.total,
            initial=counts.done,
            desc="batch",
            unit="request",
            delay=2,
            disable=not self._is_terminal,
            file=unwrap_stream(sys.stderr),
        )

    def show_counts(self) -> None:
        counts, now = self._counts, time.monotonic()
        ended = counts.done + counts.failed
        if self._is_terminal:
            if counts.failed:
                self._bar.set_postfix(failed=counts.failed, refresh=False)
            self._bar.update(ended - self._bar.n)
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            failed = f", {counts.failed} of them failed" if counts.failed else ""
            _print_line(f"{ended} of {counts.total} requests have ended{failed}")

    def print_line(self, text: str) -> None:
        self._bar.clear()
        _print_line(text)

    def close(self) -> None:
        self._bar.close()
