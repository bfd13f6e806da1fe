"""The cost of each API of the proxy, next to that of chats: ``pd-bench proxy --work apis``.

Each API gets the same message and answers with the same text, so the rows differ only in how the
API reads requests and writes answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.bench.load.reception import Reception
from pd.bench.load.stream import parse_http
from pd.bench.load.target import EndpointAddress
from pd.bench.proxy_load import PROSE
from pd.bench.serve_client import Server
from pd.core.errors import NodeFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.bench.load.reception import Piece
    from pd.bench.proxy_processes import Running
    from pd.bench.report import Row

_CONNECTIONS = 8
# Pieces of an answer after which a stream counts as begun: some APIs send events before the first
# token.
_BEGUN_PIECES = 5
_POLL_SECONDS = 0.002
# Every row's ratios are those to this API.
_REFERENCE = "chat"


class API(NamedTuple):
    """One API of the proxy.

    Attributes:
        limit: path to the field that limits the answer's tokens.
        text: paths to the text of an event; an event has at most one of them.
    """

    path: str
    fields: dict[str, Any]
    limit: tuple[str, ...]
    text: tuple[tuple[str | int, ...], ...]

    def make_body(self, tokens: int, *, stream: bool) -> dict[str, Any]:
        """Make a request for an answer of ``tokens`` tokens."""
        body: dict[str, Any] = json.loads(json.dumps(self.fields)) | {"stream": stream}
        *outer, last = self.limit
        fields = body
        for name in outer:
            fields = fields.setdefault(name, {})
        fields[last] = tokens
        return body

    def read_text(self, content: bytes) -> str:
        """Join the text of all events of a streamed answer."""
        return "".join(self._find_text(event) for event in _parse_lines(content))

    def _find_text(self, event: Any) -> str:
        for path in self.text:
            found = event
            try:
                for step in path:
                    found = found[step]
            except (KeyError, IndexError, TypeError):
                continue
            if isinstance(found, str):
                return found
        return ""


def _parse_lines(content: bytes) -> Iterator[Any]:
    """Parse server-sent events, or lines of JSON."""
    for line in content.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


_MESSAGES = [{"role": "user", "content": PROSE}]
_GREEDY = {"temperature": 0}
_DELTA: tuple[tuple[str | int, ...], ...] = (("delta", "text"),)
_RESPONSE: dict[str, Any] = {"input": PROSE, "model": "scripted"} | _GREEDY
APIS = {
    "chat": API(
        "/v1/chat/completions",
        {"messages": _MESSAGES} | _GREEDY,
        ("max_tokens",),
        (("choices", 0, "delta", "content"),),
    ),
    "completions": API(
        "/v1/completions", {"prompt": PROSE} | _GREEDY, ("max_tokens",), (("choices", 0, "text"),)
    ),
    "/generate": API(
        "/generate",
        {"text": PROSE, "incremental": True, "sampling_params": _GREEDY},
        ("sampling_params", "max_new_tokens"),
        (("text",),),
    ),
    "Anthropic": API(
        "/v1/messages",
        {"messages": _MESSAGES, "model": "scripted"} | _GREEDY,
        ("max_tokens",),
        _DELTA,
    ),
    "responses": API("/v1/responses", _RESPONSE, ("max_output_tokens",), (("delta",),)),
    "responses, not stored": API(
        "/v1/responses", _RESPONSE | {"store": False}, ("max_output_tokens",), (("delta",),)
    ),
    "Ollama chat": API(
        "/api/chat",
        {"messages": _MESSAGES, "model": "scripted", "options": _GREEDY},
        ("options", "num_predict"),
        (("message", "content"),),
    ),
}


def measure_apis(
    proxy: Running, nodes: Sequence[Running], requests: int, streams: int, tokens: int, turn: int
) -> list[Row]:
    """Measure each API once. Returns a row for each, in the order of ``APIS``.

    Args:
        turn: number of the round; each begins with another API, so drift strikes all alike.
    """
    names = list(APIS)
    turn %= len(names)
    costs: dict[str, tuple[float, float]] = {}
    for name in names[turn:] + names[:turn]:
        request = measure_requests(proxy, APIS[name], requests)
        token = asyncio.run(_measure_streams(proxy, nodes, APIS[name], streams, tokens))
        costs[name] = request, token
    chat_request, chat_token = costs[_REFERENCE]
    return [
        {
            "work": "api",
            "system": name,
            "cpu_us_per_request": costs[name][0] * 1e6,
            "cpu_us_per_token": costs[name][1] * 1e6,
            "request_ratio": costs[name][0] / chat_request,
            "token_ratio": costs[name][1] / chat_token,
        }
        for name in names
    ]


def measure_requests(proxy: Running, api: API, count: int) -> float:
    """Return the processor time of one request without streaming, in seconds."""
    server, body = Server(proxy.url, None), api.make_body(1, stream=False)

    def ask(count: int) -> None:
        asyncio.run(server.post_repeatedly(body, count, _CONNECTIONS, path=api.path))

    ask(count // 10 + 1)  # warms up
    before = proxy.cpu_seconds
    ask(count)
    return (proxy.cpu_seconds - before) / count


async def _measure_streams(
    proxy: Running, nodes: Sequence[Running], api: API, streams: int, tokens: int
) -> float:
    """Return the processor time of one token, in seconds, from when all streams have begun.

    Raises NodeFailedError if a stream fails or its text is not that of the others.
    """
    for node in nodes:
        node.read_sent_times()  # forgets earlier requests
    address = EndpointAddress.parse(proxy.url, api.path)
    request = address.make_request(api.make_body(tokens, stream=True))
    receptions = [await address.connect_unstamped(Reception) for _ in range(streams)]
    for reception in receptions:
        reception.send_request(request)
    while not all(len(r.pieces) >= _BEGUN_PIECES or r.ended.done() for r in receptions):
        await asyncio.sleep(_POLL_SECONDS)
    began, before = time.perf_counter(), proxy.cpu_seconds
    await asyncio.gather(*(reception.ended for reception in receptions))
    spent = proxy.cpu_seconds - before
    texts = {_read_answer(api, reception.pieces) for reception in receptions}
    if len(texts) != 1 or not texts.pop().startswith(PROSE.strip()[: 2 * tokens]):
        raise NodeFailedError(f"the streams of {api.path} do not have the text of the nodes")
    sent = [at for node in nodes for times in node.read_sent_times().values() for at in times]
    return spent / max(1, sum(at >= began for at in sent))


def _read_answer(api: API, pieces: Sequence[Piece]) -> str:
    answer = parse_http(pieces)
    if answer.status != 200 or not answer.complete:
        shown = answer.content[:200].decode(errors="replace")
        raise NodeFailedError(f"{api.path} answered with status {answer.status}: {shown}")
    return api.read_text(answer.content)
