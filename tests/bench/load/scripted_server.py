"""A server that logs when it sent each token: `python scripted_server.py LOG SETTINGS`.

Speaks `/v1/completions`, `/v1/chat/completions` and `/generate` with as many tokens as it is asked
for. Every event has a number of tokens that the settings give, and is logged with the time (Unix
time) just before it is written. Settings is JSON, see `Settings`. The first line on standard output
is its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How the server answers.

    `per_event`: tokens of the events in turn. `ids`, `usage`, `running_usage`: which counts events
    have. `refuses`: fields of a request that are answered 400. `key`: requests without it get 401.
    `fault`: what goes wrong with every answer whose number is a multiple of `every`.
    """

    first: float = 0.002
    interval: float = 0.002
    per_event: tuple[int, ...] = (1,)
    ids: bool = True
    usage: bool = True
    running_usage: bool = True
    refuses: tuple[str, ...] = ()
    fault: str = ""
    every: int = 1
    context: int | None = 4096
    newline: str = "\n"
    key: str = ""


class ScriptedServer:
    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings, self._log = settings, log.open("w")
        self._count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(
                line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
            )
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(head.split()[1], headers, json.loads(body or b"{}"), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        settings = self._settings
        if settings.key and headers.get("authorization") != f"bearer {settings.key}":
            return _plain(writer, 401, {"error": {"message": "a key is missing"}})
        if path == "/v1/models":
            model = {"id": "scripted", "max_model_len": settings.context}
            return _plain(writer, 200, {"data": [model]})
        if not path.startswith(("/v1/", "/generate")):
            return _plain(writer, 404, {"error": {"message": "no such path"}})
        fields = {*body, *body.get("stream_options", {}), *body.get("sampling_params", {})}
        refused = fields.intersection(settings.refuses)
        if refused:
            return _plain(writer, 400, {"error": {"message": f"unknown field {min(refused)}"}})
        name = headers.get("x-request-id", "")
        measured = name.startswith("bench-")
        self._count += measured
        fault = settings.fault if measured and self._count % settings.every == 0 else ""
        if fault == "429":
            return _plain(writer, 429, {"error": {"message": "the queue is full"}})
        if fault == "json":
            return _plain(writer, 200, {"choices": [{"text": "all at once"}]})
        if fault == "garbage":
            writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
            return None
        if fault == "hang up":
            return None
        await self._stream(path, name, body, writer, fault)
        return None

    async def _stream(
        self, path: str, name: str, body: dict[str, Any], writer: asyncio.StreamWriter, fault: str
    ) -> None:
        settings = self._settings
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            # Clients that keep connections, as AIPerf does, would send into one that closes.
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        prompt = _prompt_of(body)
        wanted = body.get("max_tokens") or body.get("sampling_params", {}).get("max_new_tokens")
        made = events = 0
        at = time.perf_counter() + settings.first
        self._write(writer, ": a comment")
        while made < wanted:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            at += settings.interval
            count = min(settings.per_event[events % len(settings.per_event)], wanted - made)
            events, made = events + 1, made + count
            event = self._event(path, body, made, count, len(prompt), made == wanted)
            sent = time.time()
            self._write(writer, f"data: {json.dumps(event)}")
            self._log.write(json.dumps([name, sent, count, prompt if events == 1 else None]) + "\n")
            if fault == "error event":
                error = {"error": {"message": "the node died", "code": 502}}
                return self._write(writer, f"data: {json.dumps(error)}")
            if fault == "bad event":
                return self._write(writer, "data: {not json")
            if fault == "cut":
                return None
            if fault == "slow":
                await asyncio.sleep(30)
        if settings.usage and path != "/generate":
            event = {"choices": [], "usage": _usage(len(prompt), made)}
            self._write(writer, f"data: {json.dumps(event)}")
        self._write(writer, "data: [DONE]")
        writer.write(b"0\r\n\r\n")
        self._log.flush()
        return None

    def _event(
        self, path: str, body: dict[str, Any], made: int, count: int, prompt: int, last: bool
    ) -> dict[str, Any]:
        settings = self._settings
        reason = "length" if last else None
        new, every = list(range(made - count, made)), list(range(made))
        if path == "/generate":
            shown = new if body.get("incremental") else every
            meta = {
                "id": "x",
                "prompt_tokens": prompt,
                "completion_tokens": made,
                "cached_tokens": prompt // 2,
                "finish_reason": {"type": "length"} if last else None,
                "stages": {"queue": 0.001, "prefill": 0.002},
            }
            return {"text": "w" * len(shown), "output_ids": shown, "meta_info": meta}
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        text = " w" * count
        choice |= {"delta": {"content": text}} if "chat" in path else {"text": text}
        if settings.ids and body.get("return_token_ids"):
            choice["token_ids"] = new
        # Some clients look at the kind of an event.
        kind = "chat.completion.chunk" if "chat" in path else "text_completion"
        event: dict[str, Any] = {"object": kind, "choices": [choice]}
        if settings.running_usage and body.get("stream_options", {}).get("continuous_usage_stats"):
            event["usage"] = _usage(prompt, made)
        return event

    def _write(self, writer: asyncio.StreamWriter, text: str) -> None:
        data = text.encode() + self._settings.newline.encode() * 2
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _prompt_of(body: dict[str, Any]) -> list[Any]:
    """Token ids, or the words of all that was said."""
    if "messages" in body:
        return [word for message in body["messages"] for word in message["content"].split()]
    prompt = body.get("prompt") or body.get("input_ids") or body.get("text") or []
    return prompt.split() if isinstance(prompt, str) else prompt


def _usage(prompt: int, made: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


def _plain(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)


async def main() -> None:
    given = json.loads(sys.argv[2])
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    server = ScriptedServer(settings, Path(sys.argv[1]))
    listening = await asyncio.start_server(
        server.serve, "127.0.0.1", 0, limit=1 << 26, backlog=4096
    )
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main())
