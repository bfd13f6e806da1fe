"""Evaluate a server that speaks OpenAI's chat API on the embedded model's held-out sets.

    python training/evaluate_model.py --url http://127.0.0.1:8000
    python training/evaluate_model.py --url http://127.0.0.1:8000 --skill recall-4k --limit 50

Needs nothing but Python. Answers are greedy, and right only if they are exactly the expected ones.
The exit status is 0 if every bar is met, 1 if not, 2 if the server is unreachable.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from embedded.heldout import BARS, SEED, Example, evaluation_set, is_right

_KEY_VARIABLES = ("PD_API_KEY", "OPENAI_API_KEY")
_MAX_TOKENS = 96
_HERE = Path(__file__).parent


class ServerError(Exception):
    """The server answered with an error, or not at all."""


@dataclass
class Outcome:
    """``answer`` is the last one; empty if a request failed, and then ``error`` says why."""

    example: Example
    answer: str = ""
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and is_right(self.example, self.answer)


class Client:
    """Asks one server; may be used by several threads."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        # An HTTP proxy from the environment has no business on loopback.
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(url) else []
        self._opener = urllib.request.build_opener(*handlers)

    def first_model(self) -> str:
        """Name of the first model served. Raises ServerError."""
        models = self._send("/v1/models", None).get("data") or []
        if not models:
            raise ServerError("the server lists no model; name one with --model")
        return str(models[0]["id"])

    def chat(self, model: str, messages: list[dict[str, str]]) -> str:
        """Return the greedy answer. Raises ServerError."""
        body = {
            "model": model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": _MAX_TOKENS,
        }
        answer = self._send("/v1/chat/completions", body)
        try:
            return answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise ServerError(f"not a chat completion: {json.dumps(answer)[:200]}") from None

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                found: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ServerError(f"{path} answered {error.code}: {text[:300]}") from None
        except (OSError, ValueError) as error:
            raise ServerError(f"{self._url}{path}: {error}") from None
        return found


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ask(client: Client, model: str, example: Example) -> Outcome:
    """Ask the turns of one example. Later turns see the earlier answers."""
    messages = [message._asdict() for message in example.before]
    answer = ""
    for turn in example.turns:
        messages.append({"role": "user", "content": turn.question})
        try:
            answer = client.chat(model, messages)
        except ServerError as error:
            return Outcome(example, error=str(error))
        messages.append({"role": "assistant", "content": answer})
    return Outcome(example, answer)


def main() -> int:
    """Ask, print a table, and say by the exit status whether every bar is met."""
    args = _arguments()
    client = Client(args.url, args.api_key, args.timeout)
    try:
        model = args.model or client.first_model()
    except ServerError as error:
        print(f"evaluate_model: {error}", file=sys.stderr)
        return 2
    commit, report = _commit(), []
    print(f"{'skill':12} {'right':>11} {'share':>7} {'bar':>5}   time")
    with ThreadPoolExecutor(args.concurrency) as pool:
        for name in dict.fromkeys(args.skill):
            some = evaluation_set(name, args.seed)[: args.limit]
            began = time.monotonic()
            outcomes = list(pool.map(lambda example: ask(client, model, example), some))
            report.append(_show(name, outcomes, time.monotonic() - began, args.show_wrong))
    if args.output:
        _write(args, model, commit, report)
    return 0 if all(row["met"] for row in report) else 1


def _commit() -> str:
    """Return the commit of the working tree, or PD_COMMIT if there is no repository."""
    if "PD_COMMIT" in os.environ:
        return os.environ["PD_COMMIT"]
    command = ["git", "-C", str(_HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _write(args: argparse.Namespace, model: str, commit: str, rows: list[dict[str, Any]]) -> None:
    """Write a result file, of which scripts/render_benchmarks.py makes a section."""
    settings = {"model": model, "server": args.server, "concurrency": args.concurrency}
    report = {
        "benchmark": "evaluate_model",
        "command": "python " + shlex.join(sys.argv),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "settings": {name: value for name, value in settings.items() if value},
        "results": rows,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _show(name: str, outcomes: list[Outcome], seconds: float, wrong: int) -> dict[str, Any]:
    """Print one line of the table, and errors below it."""
    right = sum(outcome.right for outcome in outcomes)
    share = right / len(outcomes)
    failed = [outcome for outcome in outcomes if outcome.error]
    met = share >= BARS[name]
    counted = f"{right}/{len(outcomes)}"
    verdict = "" if met else "  missed"
    print(
        f"{name:12} {counted:>11} {share:>7.1%} {BARS[name]:>5.0%} {seconds:5.0f} s{verdict}",
        flush=True,
    )
    if failed:
        print(f"  {len(failed)} requests failed, the first with: {failed[0].error}")
    for outcome in [o for o in outcomes if not o.right and not o.error][:wrong]:
        turn = outcome.example.turns[-1]
        print(f"  {turn.question[-80:]!r}: {outcome.answer!r}, expected {turn.answer!r}")
    return {
        "skill": name,
        "right": right,
        "total": len(outcomes),
        "failed_requests": len(failed),
        "right_rate": round(share, 4),
        "bar_rate": BARS[name],
        "met": met,
        "seconds": round(seconds, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server, with or without /v1")
    add("--api-key", help=f"default: {' or '.join(_KEY_VARIABLES)} of the environment")
    add("--model", help="name in the API (default: the first that the server lists)")
    add("--skill", action="append", choices=list(BARS), help="may be repeated (default: all)")
    add("--limit", type=_positive, metavar="N", help="examples per skill at most")
    add("--concurrency", type=_positive, default=8, metavar="N", help="requests at a time")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for one answer")
    add("--seed", type=int, default=SEED, help="of the held-out sets; the report used the default")
    add("--show-wrong", type=int, default=2, metavar="N", help="wrong answers to print per skill")
    add("--output", type=Path, metavar="FILE", help="write the numbers there, too, as JSON")
    add("--server", metavar="TEXT", help="what that file says about the server")
    args = parser.parse_args()
    args.skill = args.skill or list(BARS)
    args.api_key = args.api_key or next(filter(None, map(os.environ.get, _KEY_VARIABLES)), None)
    if urlsplit(args.url).scheme not in ("http", "https"):
        parser.error(f"--url must begin with http:// or https://, not {args.url}")
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
