"""``pd-launch demo``: the whole system on this machine, one question, and where its time went."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pd.commands import parser as types
from pd.commands.proxy import API_KEY_VARIABLE
from pd.core.errors import SetupError
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator
    from types import FrameType

    import httpx

    from pd.commands.processes import Children, LaunchedProcess

TEXT = "one prefill node, one decode node and a proxy on this machine"
QUESTION = "What does the prefill node do?"
MAX_TOKENS = 128
# More than a tiny model gains from only makes its threads wait for each other.
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
    parser.add_argument("--prompt", default=QUESTION, metavar="TEXT", help="what to ask")
    parser.add_argument(
        "--port", type=types.port, default=0, help="of the proxy (default: a free one)"
    )


def run(args: argparse.Namespace) -> int:
    """Start everything, ask, show, stop. Raises SetupError if anything failed."""
    import tempfile

    from pd.commands.processes import Children

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # --prompt may hold any character
    # SIGINT too: a script's background jobs start with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="pd-demo-") as directory:
        children = Children(Path(directory))
        try:
            return _demo(args, children)
        finally:
            try:
                say("\nstopping")
            finally:
                children.stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _demo(args: argparse.Namespace, children: Children) -> int:
    say("model         the one that comes with pd: small, trained, and at home in this system only")
    proxy, decode = _start(args.port, children)
    # Fresh processes shake hands, compile the chat template and so on; what is shown is the rest.
    ask(proxy.url, "Hello", show=False)
    say(f"\n{args.prompt}\n")
    before = Times.read(proxy.url, decode.url)
    answer = ask(proxy.url, args.prompt)
    say("")
    _show_times(answer, before, Times.read(proxy.url, decode.url))
    if args.serve:
        _serve(proxy.url, children)
    return 0


def _start(port: int, children: Children) -> tuple[LaunchedProcess, LaunchedProcess]:
    """The proxy and the decode node, ready."""
    flags = ["--model", EMBEDDED_MODEL, "--device", "cpu"]
    flags += ["--port", 0, "--kv-cache-tokens", 16384, "--cpu-threads", _threads()]
    prefill = children.start("prefill node", "prefill", *flags, "--bootstrap-port", 0)
    decode = children.start("decode node", "decode", *flags)
    _wait(children, prefill, decode)
    proxy = children.start(
        "proxy", "proxy", "--port", port, "--prefill", prefill.url, "--decode", decode.url
    )
    _wait(children, proxy)
    return proxy, decode


def _threads() -> int:
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))


def _wait(children: Children, *started: LaunchedProcess) -> None:
    names = " and ".join(child.name for child in started)
    last = -1

    def progress(seconds: float) -> None:
        nonlocal last
        if seconds < _QUIET_SECONDS or int(seconds) == last:
            return
        if sys.stdout.isatty():
            say(f"\rstarting {names}: {int(seconds)} s", end="")
        elif last < 0:
            say(f"starting {names} ...")
        last = int(seconds)

    children.wait_ready(started, progress)
    if last >= 0 and sys.stdout.isatty():
        say("\r\x1b[K", end="")
    for child in started:
        say(f"{child.name:13} {child.url}  (ready after {child.seconds:.1f} s)")


# ---- the question


@dataclass
class StreamedAnswer:
    """Measurements of one answer; times in seconds since the request was sent."""

    first_token: float = 0.0
    total: float = 0.0
    usage: dict[str, int] = field(default_factory=dict)


def ask(url: str, prompt: str, *, show: bool = True) -> StreamedAnswer:
    """Stream a chat completion to standard output. Raises SetupError if it does not end well."""
    import httpx

    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = StreamedAnswer()
    # Without trust_env: an HTTP proxy from the environment has no business on loopback.
    with httpx.Client(trust_env=False, timeout=60.0, headers=_headers()) as client:
        began = time.monotonic()
        try:
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise SetupError(
                        f"the proxy answered {response.status_code}: {_read(response)}"
                    )
                for text in _read_stream(response.iter_lines(), answer, began):
                    if show:
                        say(printable(text), end="")
        except httpx.HTTPError as error:
            raise SetupError(f"the answer broke off: {error or type(error).__name__}") from error
    answer.total = time.monotonic() - began
    return answer


def _headers() -> dict[str, str]:
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _read(response: httpx.Response) -> str:
    return response.read().decode(errors="replace")


def _read_stream(lines: Iterable[str], answer: StreamedAnswer, began: float) -> Iterator[str]:
    """The pieces of the answer as they arrive."""
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


def printable(text: str) -> str:
    """The text with a dot for each character that would move the cursor or ring the bell."""
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in text)


# ---- the table


class Times(NamedTuple):
    """Sums over all requests so far: seconds by stage, and bytes of KV moved."""

    stages: dict[str, float]
    moved: float

    @classmethod
    def read(cls, proxy: str, decode: str) -> Times:
        """Read the sums from the metrics of the proxy and the decode node."""
        stages = read_metric(proxy, "pd_proxy_stage_seconds_sum", "stage")
        return cls(stages, read_metric(decode, "pd_transferred_bytes_total")[""])


def _show_times(answer: StreamedAnswer, before: Times, after: Times) -> None:
    """Print where the time went. The nodes have no other client, so that the differences of the
    sums are this request's."""
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
    say("\nwhere the time went (both nodes begin at once, so their rows overlap)\n")
    for stage, text in rows:
        say(f"  {stage:10} {milliseconds[stage]:9.1f} ms   {text}")
    say(f"  {'':10} {'-' * 12}")
    say(f"  {'TTFT':10} {answer.first_token * 1e3:9.1f} ms   until the client saw the first token")
    say(f"  {'total':10} {answer.total * 1e3:9.1f} ms   until the client had the whole answer")


def read_metric(url: str, name: str, label: str = "") -> dict[str, float]:
    """Samples of a metric by the value of one label. Raises SetupError if it is not there."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0).raise_for_status().text
    except httpx.HTTPError as error:
        raise SetupError(f"no metrics from {url}: {error or type(error).__name__}") from error
    found = {
        sample.labels.get(label, ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }
    if not found:
        raise SetupError(f"{url}/metrics has no {name}")
    return found


def _serve(url: str, children: Children) -> None:
    """Serve until Ctrl-C. Raises SetupError if a process ends by itself."""
    # The shell puts the key in; a terminal's lines may be read by others.
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if _headers() else ""
    say(f"\nserving at {url} until Ctrl-C; try\n")
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\")
    say("""    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}'\n""")
    try:
        while True:
            children.check()
            time.sleep(0.2)
    except KeyboardInterrupt:
        return


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)
