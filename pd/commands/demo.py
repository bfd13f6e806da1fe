"""``pd-launch demo``: the whole system on this machine, one question, and where its time went."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pd.commands import parser as types
from pd.commands.proxy import API_KEY_VARIABLE
from pd.core.errors import SetupError
from pd.embedded import EMBEDDED_MODEL
from pd.util.output import unwrap_stream

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from pd.commands.processes import Children, LaunchedProcess

TEXT = "one prefill node, one decode node and a proxy on this machine"
QUESTION = "What does the prefill node do?"
MAX_TOKENS = 128
# With more threads a tiny model gains nothing, because they wait for each other.
_MAX_THREADS = 4
_QUIET_SECONDS = 2.0

_EXAMPLES = """\
examples:
  pd-launch demo
  pd-launch demo --prompt "Why are there two nodes?"
  pd-launch demo --serve --port 8000      # keeps serving until Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("--serve", action="store_true", help="keep serving after the answer")
    parser.add_argument("--prompt", default=QUESTION, metavar="TEXT", help="question to ask")
    parser.add_argument(
        "--port", type=types.parse_port, default=0, help="port of the proxy (default: a free one)"
    )


def run(args: argparse.Namespace) -> int:
    """Start everything, ask, show and stop. Raises SetupError if anything failed."""
    import tempfile

    from pd.commands.processes import ENDING, Children, interrupt_on

    # We also handle SIGINT, because background jobs of scripts start with it ignored.
    with (
        interrupt_on(*ENDING),
        tempfile.TemporaryDirectory(prefix="pd-demo-") as directory,
    ):
        children = Children(Path(directory))
        try:
            return _run_demo(args, children)
        finally:
            try:
                print_text("\nstopping")
            finally:
                children.stop()


def _run_demo(args: argparse.Namespace, children: Children) -> int:
    print_text("model         the one that comes with pd: small, trained to answer about pd only")
    proxy, decode = _start_processes(args.port, children)
    # New processes shake hands, compile the chat template and so on. We exclude this from the
    # times.
    ask_question(proxy.url, "Hello", show=False)
    print_text(f"\n{args.prompt}\n")
    before = Times.read_metrics(proxy.url, decode.url)
    answer = ask_question(proxy.url, args.prompt)
    print_text("")
    _show_times(answer, before, Times.read_metrics(proxy.url, decode.url))
    if args.serve:
        _serve_until_interrupt(proxy.url, children)
    return 0


def _start_processes(port: int, children: Children) -> tuple[LaunchedProcess, LaunchedProcess]:
    """Start the proxy and the decode node, and wait until they are ready."""
    threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
    flags = ["--model", EMBEDDED_MODEL, "--device", "cpu"]
    flags += ["--port", 0, "--kv-cache-tokens", 16384, "--cpu-threads", threads]
    prefill = children.start("prefill node", "prefill", *flags, "--bootstrap-port", 0)
    decode = children.start("decode node", "decode", *flags)
    _wait_ready(children, prefill, decode)
    proxy = children.start(
        "proxy", "proxy", "--port", port, "--prefill", prefill.url, "--decode", decode.url
    )
    _wait_ready(children, proxy)
    return proxy, decode


def _wait_ready(children: Children, *started: LaunchedProcess) -> None:
    names = " and ".join(child.name for child in started)
    last = -1

    def progress(seconds: float) -> None:
        nonlocal last
        if seconds < _QUIET_SECONDS or int(seconds) == last:
            return
        if sys.stdout.isatty():
            _rewrite_line(f"\rstarting {names}: {int(seconds)} s")
        elif last < 0:
            print_text(f"starting {names} ...")
        last = int(seconds)

    children.wait_ready(started, progress)
    if last >= 0 and sys.stdout.isatty():
        _rewrite_line("\r\x1b[K")
    for child in started:
        print_text(f"{child.name:13} {child.url}  (ready after {child.seconds:.1f} s)")


# ---- the question


@dataclass
class StreamedAnswer:
    """Measurements of one answer; times in seconds since we sent the request."""

    first_token: float = 0.0
    total: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)


def ask_question(url: str, prompt: str, *, show: bool = True) -> StreamedAnswer:
    """Stream a chat completion to standard output. Raises SetupError if it ends with an error."""
    import httpx

    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = StreamedAnswer()
    # We ignore proxies of the environment, because they have no business on loopback.
    with httpx.Client(trust_env=False, timeout=60.0, headers=_make_headers()) as client:
        began = time.monotonic()
        try:
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    text = response.read().decode(errors="replace")
                    raise SetupError(f"the proxy answered {response.status_code}: {text}")
                for text in _read_stream(response.iter_lines(), answer, began):
                    if show:
                        print_text(mask_controls(text), end="")
        except httpx.HTTPError as error:
            raise SetupError(f"the answer broke off: {error or type(error).__name__}") from error
    answer.total = time.monotonic() - began
    return answer


def _make_headers() -> dict[str, str]:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read_stream(lines: Iterable[str], answer: StreamedAnswer, began: float) -> Iterator[str]:
    """Yield the pieces of the answer as they arrive."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            raise SetupError(f"the answer ended with an error: {event['error']['message']}")
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            answer.first_token = answer.first_token or time.monotonic() - began
            yield choice["delta"].get("content") or ""
    raise SetupError("the answer ended without [DONE]")


def mask_controls(text: str) -> str:
    """Replace characters that would move the cursor or ring the bell by dots."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


# ---- the table


class Times(NamedTuple):
    """Sums over all requests so far: seconds by stage, and bytes of KV moved."""

    stages: dict[str, float]
    moved: float

    @classmethod
    def read_metrics(cls, proxy: str, decode: str) -> Times:
        """Read the sums from the metrics of the proxy and the decode node."""
        stages = read_metric(proxy, "pd_proxy_stage_seconds_sum", "stage")
        return cls(stages, read_metric(decode, "pd_transferred_bytes_total")[""])


def _show_times(answer: StreamedAnswer, before: Times, after: Times) -> None:
    """Print where the time went. The nodes have no other client, so the growth of their sums is due
    to this request."""
    milliseconds = {s: (t - before.stages[s]) * 1e3 for s, t in after.stages.items()}
    kib = (after.moved - before.moved) / 1024
    prompt, output = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
    later = max(output - 1, 1)
    rows = [
        ("queue", "prefill node: until it was its turn"),
        ("prefill", f"prefill node: {prompt} prompt tokens and the first token"),
        ("bootstrap", "decode node: prefill node found, memory reserved"),
        ("transfer", f"decode node: until {kib:.0f} KiB of KV cache had arrived"),
        ("decode", f"decode node: {later} tokens, {milliseconds['decode'] / later:.1f} ms each"),
    ]
    print_text("\nwhere the time went (both nodes begin at once, so their rows overlap)\n")
    for stage, text in rows:
        print_text(f"  {stage:10} {milliseconds[stage]:9.1f} ms   {text}")
    ttft, total = answer.first_token * 1e3, answer.total * 1e3
    print_text(f"  {'':10} {'-' * 12}")
    print_text(f"  {'TTFT':10} {ttft:9.1f} ms   until the client saw the first token")
    print_text(f"  {'total':10} {total:9.1f} ms   until the client had the whole answer")


def read_metric(url: str, name: str, label: str = "") -> dict[str, float]:
    """Return the samples of a metric by the value of one label. Raises SetupError without any."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0).raise_for_status().text
    except httpx.HTTPError as error:
        raise SetupError(f"no metrics from {url}: {error or type(error).__name__}") from error
    samples = {
        sample.labels.get(label, ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }
    if not samples:
        raise SetupError(f"{url}/metrics has no {name}")
    return samples


def _serve_until_interrupt(url: str, children: Children) -> None:
    """Serve until Ctrl-C. Raises SetupError if a process ends on its own."""
    # We print the variable instead of the key, because others may read the terminal.
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if _make_headers() else ""
    print_text(f"\nserving at {url} until Ctrl-C; try\n")
    print_text(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    print_text(
        """    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'\n"""
    )
    try:
        while True:
            children.check_alive()
            time.sleep(0.2)
    except KeyboardInterrupt:
        return


def print_text(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def _rewrite_line(text: str) -> None:
    """Overwrite the current line of the terminal."""
    print(text, end="", flush=True, file=unwrap_stream(sys.stdout))
