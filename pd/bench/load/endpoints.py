"""The APIs of servers: bodies of requests, and the contents of events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pd.bench.load.workload import Prompt, Turn

# No server counts so many tokens, and no stage takes so many seconds. Sums and squares of smaller
# numbers are finite.
_NUMBERS_END = 1 << 53


@dataclass(frozen=True)
class Options:
    """Optional fields; we leave out those rejected by the server.

    Attributes:
        token_ids: ``return_token_ids``: each event has the ids of its tokens.
        running_usage: ``stream_options.continuous_usage_stats``: each event counts tokens.
        usage: ``stream_options.include_usage``: the last event counts tokens.
        ignore_eos: answers have their full length.
        incremental: ``/generate`` sends only new tokens.
    """

    token_ids: bool = True
    running_usage: bool = True
    usage: bool = True
    ignore_eos: bool = True
    incremental: bool = True


@dataclass(frozen=True)
class Sampling:
    """How to sample answers, and further fields of every request."""

    model: str | None = None
    temperature: float = 0.0
    extra: dict[str, Any] | None = None


@dataclass
class Event:
    """Contents of one event of a stream.

    Attributes:
        text: new text.
        ids: new token ids; None if the server sends none.
        total: the server's count of the answer's tokens so far; None if it does not count.
        prompt_tokens, cached_tokens: the server's counts; None if it does not say.
    """

    text: str = ""
    ids: list[int] | None = None
    total: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stages: dict[str, float] | None = None
    error: str | None = None


class Endpoint(Protocol):
    """One API of a server."""

    path: str

    def make_body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        """Make the body of a request. Raises UsageError for a prompt of the wrong kind."""

    def read_event(self, event: dict[str, Any]) -> Event:
        """Read one event. Raises KeyError, TypeError, ValueError, AttributeError or ArithmeticError
        for anything that is not an event of this API."""


def find_endpoint(path: str) -> Endpoint:
    """Return the endpoint of a path. Raises UsageError."""
    known: dict[str, Endpoint] = {e.path: e for e in (Completions(), Chat(), NativeGenerate())}
    if path not in known:
        raise UsageError(f"--endpoint is one of {', '.join(known)}, not {path}")
    return known[path]


class Completions:
    """OpenAI's completions."""

    path = "/v1/completions"

    def make_body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        _reject_messages(prompt)
        return _openai_fields(turn, sampling, options) | {"prompt": prompt}

    def read_event(self, event: dict[str, Any]) -> Event:
        contents = _read_openai_event(event)
        for choice in event.get("choices") or ():
            contents.text += choice.get("text") or ""
            _add_choice(contents, choice)
        return contents


class Chat:
    """OpenAI's chat."""

    path = "/v1/chat/completions"

    def make_body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            raise UsageError("a chat takes no token ids: give text or messages")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _openai_fields(turn, sampling, options) | {"messages": messages}

    def read_event(self, event: dict[str, Any]) -> Event:
        contents = _read_openai_event(event)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            for name in ("reasoning_content", "reasoning", "content"):
                contents.text += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                contents.text += call["function"].get("arguments") or ""
            _add_choice(contents, choice)
        return contents


def _openai_fields(turn: Turn, sampling: Sampling, options: Options) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": turn.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
    }
    if sampling.model is not None:
        fields["model"] = sampling.model
    if options.usage:
        fields["stream_options"] = {"include_usage": True}
        if options.running_usage:
            fields["stream_options"]["continuous_usage_stats"] = True
    if options.token_ids:
        fields["return_token_ids"] = True
    if turn.schema is not None:
        schema = {"name": "answer", "schema": turn.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif options.ignore_eos:
        fields["ignore_eos"] = True
    return fields | turn.extra | (sampling.extra or {})


def _read_openai_event(event: dict[str, Any]) -> Event:
    if "error" in event:
        return Event(error=_error_text(event["error"]))
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Event(
        total=_check_count(usage.get("completion_tokens")),
        prompt_tokens=_check_count(usage.get("prompt_tokens")),
        cached_tokens=_check_count(details.get("cached_tokens")),
    )


def _add_choice(contents: Event, choice: dict[str, Any]) -> None:
    ids = choice.get("token_ids")
    if ids is not None:
        contents.ids = (contents.ids or []) + [int(token) for token in ids]
    contents.finish_reason = choice.get("finish_reason") or contents.finish_reason


class NativeGenerate:
    """SGLang's native API, which pd's proxy also has."""

    path = "/generate"

    def make_body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        _reject_messages(prompt)
        params: dict[str, Any] = {
            "max_new_tokens": turn.max_tokens,
            "temperature": sampling.temperature,
        }
        if turn.schema is not None:
            params["json_schema"] = json.dumps(turn.schema)
        elif options.ignore_eos:
            params["ignore_eos"] = True
        fields: dict[str, Any] = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": params | (turn.extra.get("sampling_params") or {}),
            "stream": True,
        }
        if options.incremental:
            fields["incremental"] = True
        extra = {name: value for name, value in turn.extra.items() if name != "sampling_params"}
        return fields | extra | (sampling.extra or {})

    def read_event(self, event: dict[str, Any]) -> Event:
        """Read one event. Its text may repeat all earlier events; `_Reader` finds out."""
        if "error" in event:
            return Event(error=_error_text(event["error"]))
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return Event(error=f"aborted: {reason.get('message') or 'by the server'}")
        ids, stages, text = event.get("output_ids"), meta.get("stages"), event.get("text") or ""
        if not isinstance(text, str):
            raise TypeError(f"text is {type(text).__name__}")
        return Event(
            text=text,
            ids=None if ids is None else [int(token) for token in ids],
            total=_check_count(meta.get("completion_tokens")),
            prompt_tokens=_check_count(meta.get("prompt_tokens")),
            cached_tokens=_check_count(meta.get("cached_tokens")),
            finish_reason=reason["type"] if reason else None,
            stages={str(k): _check_seconds(v) for k, v in stages.items()} if stages else None,
        )


def _reject_messages(prompt: Prompt) -> None:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        raise UsageError("messages need --endpoint /v1/chat/completions")


def _check_count(value: Any) -> int | None:
    """Return a count of tokens; None for anything else. Raises ValueError for an absurd one."""
    if type(value) is not int or value < 0:
        return None
    if value >= _NUMBERS_END:
        raise ValueError("a count of tokens is too large")
    return value


def _check_seconds(value: Any) -> float:
    """Return the time of a stage. Raises ValueError for an absurd one."""
    seconds = float(value)
    # NOTE: not `abs(seconds) >= …`, because NaN would pass.
    if not abs(seconds) < _NUMBERS_END:
        raise ValueError(f"no stage takes {seconds:g} s")
    return seconds


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:300]
