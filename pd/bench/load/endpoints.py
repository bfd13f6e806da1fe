"""Requests of each endpoint, and what its events say."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from pd.bench.load.workload import Prompt, Turn

# No server counts so many tokens, and no stage takes so many seconds. Sums and squares of numbers
# below it are finite.
_NUMBERS_END = 1 << 53


@dataclass(frozen=True)
class Options:
    """Fields that not every server takes; what a server refuses is left out for it.

    Attributes:
        token_ids: ``return_token_ids``: every event names its tokens.
        running_usage: ``stream_options.continuous_usage_stats``: every event counts them.
        usage: ``stream_options.include_usage``: the last event counts them.
        ignore_eos: answers have their full length.
        incremental: ``/generate`` sends what is new, not all so far.
    """

    token_ids: bool = True
    running_usage: bool = True
    usage: bool = True
    ignore_eos: bool = True
    incremental: bool = True

    def without(self, name: str) -> Options:
        return replace(self, **{name: False})


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and fields that every request has beside."""

    model: str | None = None
    temperature: float = 0.0
    extra: dict[str, Any] | None = None


@dataclass
class Event:
    """Contents of one event of a stream.

    Attributes:
        text: text that it adds.
        ids: token ids that it adds; None where the server names none.
        total: tokens of the answer so far, by the server's count; None if it does not count.
        prompt_tokens, cached_tokens: by the server's count; None if it does not say.
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

    def body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        """Body of a request. Raises UsageError for a prompt that the API cannot take."""

    def read(self, event: dict[str, Any]) -> Event:
        """Raises KeyError, TypeError, ValueError, AttributeError or ArithmeticError for what is no
        event of it."""


def endpoint(path: str) -> Endpoint:
    """The endpoint of a path. Raises UsageError."""
    known: dict[str, Endpoint] = {e.path: e for e in (Completions(), Chat(), NativeGenerate())}
    if path not in known:
        raise UsageError(f"--endpoint is one of {', '.join(known)}, not {path}")
    return known[path]


class Completions:
    """OpenAI's completions."""

    path = "/v1/completions"

    def body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        _refuse_messages(prompt)
        return _openai_fields(turn, sampling, options) | {"prompt": prompt}

    def read(self, event: dict[str, Any]) -> Event:
        found = _openai_event(event)
        for choice in event.get("choices") or ():
            found.text += choice.get("text") or ""
            _add_choice(found, choice)
        return found


class Chat:
    """OpenAI's chat."""

    path = "/v1/chat/completions"

    def body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            raise UsageError("a chat takes no token ids: give text or messages")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _openai_fields(turn, sampling, options) | {"messages": messages}

    def read(self, event: dict[str, Any]) -> Event:
        found = _openai_event(event)
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            for name in ("reasoning_content", "reasoning", "content"):
                found.text += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                found.text += call["function"].get("arguments") or ""
            _add_choice(found, choice)
        return found


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


def _openai_event(event: dict[str, Any]) -> Event:
    if "error" in event:
        return Event(error=_error_text(event["error"]))
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Event(
        total=_count(usage.get("completion_tokens")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
    )


def _add_choice(found: Event, choice: dict[str, Any]) -> None:
    ids = choice.get("token_ids")
    if ids is not None:
        found.ids = (found.ids or []) + [int(token) for token in ids]
    found.finish_reason = choice.get("finish_reason") or found.finish_reason


class NativeGenerate:
    """SGLang's native API, which pd's proxy has too."""

    path = "/generate"

    def body(
        self, prompt: Prompt, turn: Turn, sampling: Sampling, options: Options
    ) -> dict[str, Any]:
        _refuse_messages(prompt)
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

    def read(self, event: dict[str, Any]) -> Event:
        """Read one event. Its text may be that of all events so far; `_Reader` finds out."""
        if "error" in event:
            return Event(error=_error_text(event["error"]))
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return Event(error=f"aborted: {reason.get('message') or 'by the server'}")
        ids, stages = event.get("output_ids"), meta.get("stages")
        return Event(
            text=_text(event.get("text")),
            ids=None if ids is None else [int(token) for token in ids],
            total=_count(meta.get("completion_tokens")),
            prompt_tokens=_count(meta.get("prompt_tokens")),
            cached_tokens=_count(meta.get("cached_tokens")),
            finish_reason=reason["type"] if reason else None,
            stages={str(k): _seconds(v) for k, v in stages.items()} if stages else None,
        )


def _refuse_messages(prompt: Prompt) -> None:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        raise UsageError("messages need --endpoint /v1/chat/completions")


def _count(value: Any) -> int | None:
    """A count of tokens; None for what is none. Raises ValueError for one that cannot be true."""
    if type(value) is not int or value < 0:
        return None
    if value >= _NUMBERS_END:
        raise ValueError("a count of tokens is too large")
    return value


def _seconds(value: Any) -> float:
    """Time of a stage. Raises ValueError for one that cannot be true."""
    seconds = float(value)
    # NOTE: not `abs(seconds) >= …`, which would let NaN pass.
    if not abs(seconds) < _NUMBERS_END:
        raise ValueError(f"no stage takes {seconds:g} s")
    return seconds


def _text(value: Any) -> str:
    """Text of an event; empty for none. Raises TypeError for what is no text."""
    text = value or ""
    if not isinstance(text, str):
        raise TypeError(f"text is {type(text).__name__}")
    return text


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:300]
