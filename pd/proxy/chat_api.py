"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd.core.errors import InvalidRequestError
from pd.core.sampling_params import MAX_TOP_LOGPROBS
from pd.proxy import logprobs, openai_common
from pd.proxy.access import caller_of
from pd.proxy.fields import show
from pd.proxy.generation import Spec
from pd.proxy.job import Job
from pd.proxy.service import encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.responses import Response

    from pd.proxy.fields import Fields
    from pd.proxy.generation import Choice, Delta
    from pd.proxy.openai_common import OpenAIRequest
    from pd.proxy.service import ModelView, Service
    from pd.proxy.tokenizer import TextModel

ENDPOINT = "/v1/chat/completions"
# Templates are programs, which take some time for each.
MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatAPI:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def handle(self, request: Request) -> Response:
        async with self._service.body(request) as body:
            fields, asked, messages = await body.read(lambda fields: _read(fields, request))
            model = await self._service.model(asked.model)
            self._service.admit(1)
            spec = await body.run(_prepare, fields, asked, messages, model)
        owner = caller_of(request.scope).owner
        job = Job(asked.names.rid, ENDPOINT, owner=owner, streaming=asked.stream)
        return self._service.respond(job, [spec], _Renderer(job, asked, model), asked.timeout)


def _read(fields: Fields, request: Request) -> tuple[Fields, OpenAIRequest, list[dict[str, Any]]]:
    """Raises InvalidRequestError."""
    fields.refuse({"echo": (False,), "prompt": ()})
    asked = _read_logprobs(fields, openai_common.read_request(fields, request, "chatcmpl-"))
    return fields, asked, read_messages(fields)


def _prepare(
    fields: Fields, asked: OpenAIRequest, messages: list[dict[str, Any]], model: ModelView
) -> Spec:
    """The prompt as it goes to the nodes. Raises InvalidRequestError."""
    text = model.need_text("messages")
    prompt = render_prompt(fields, text, messages)
    # The template writes the special tokens itself.
    ids = encode(model, prompt, "messages", add_special_tokens=False)
    return Spec(
        rid=asked.names.rid,
        model=model.name,
        token_ids=ids,
        params=asked.params(model, len(ids), None),
        text_model=text,
        stop=asked.stop,
        namespace=asked.namespace,
        priority=asked.priority,
        skip_special_tokens=asked.skip_special_tokens,
    )


def render_prompt(fields: Fields, text: TextModel, messages: list[dict[str, Any]]) -> str:
    """Messages as one prompt for the tokenizer. Raises InvalidRequestError."""
    template, special = text.template(), text.special
    continues = fields.boolean("continue_final_message")
    generates = fields.boolean("add_generation_prompt", not continues)
    if continues and generates:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true",
            param="continue_final_message",
        )
    if not template.knows_developer:
        # OpenAI's newer name; a template that ignored it would drop the instructions.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    given = fields.mapping("chat_template_kwargs")
    extra = given.data if given else None
    hidden: list[str] = []
    if special is not None:
        try:
            messages, extra = special.hide_messages(messages, hidden), special.hide(extra, hidden)
        except RecursionError:
            raise InvalidRequestError(
                "messages or chat_template_kwargs are nested too deeply", param="messages"
            ) from None
    prompt = template.render(
        messages,
        add_generation_prompt=generates,
        continue_final_message=continues,
        extra=extra,
    )
    return prompt if special is None else special.reveal(prompt, hidden)


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """Raises InvalidRequestError for anything but a list of messages with text."""
    messages = fields.raw("messages")
    if type(messages) is not list or not messages:
        raise fields.wrong("messages", "a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} messages; at most {MAX_MESSAGES} are taken",
            param="messages",
        )
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if type(message) is not dict:
        raise InvalidRequestError(f"{name} must be an object, not {show(message)}", param=name)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{name}.role must be one of {', '.join(ROLES)}, not {show(role)}", param=f"{name}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message | {"content": ""}
    return message | {"content": _read_content(content, f"{name}.content")}


def _read_content(content: Any, name: str) -> str:
    if type(content) is str:
        return content
    if type(content) is not list:
        raise InvalidRequestError(
            f"{name} must be a string or a list of text parts, not {show(content)}", param=name
        )
    texts = []
    for part in content:
        text = part.get("text") if type(part) is dict and part.get("type") == "text" else None
        if type(text) is not str:
            raise InvalidRequestError(
                f'{name} may contain only parts like {{"type": "text", "text": "…"}}, '
                f"not {show(part)}",
                param=name,
            )
        texts.append(text)
    return "\n".join(texts)


def _read_logprobs(fields: Fields, asked: OpenAIRequest) -> OpenAIRequest:
    wanted = fields.boolean("logprobs")
    count = fields.integer("top_logprobs")
    if count is not None:
        if not 0 <= count <= MAX_TOP_LOGPROBS:
            raise fields.wrong("top_logprobs", f"between 0 and {MAX_TOP_LOGPROBS}")
        if count and not wanted:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
    kwargs = {"logprobs": wanted, "top_logprobs": (count or 0) if wanted else 0}
    return replace(asked, kwargs=asked.kwargs | kwargs)


class _Renderer:
    """Chat completions, whole or in chunks; a choice's first chunk carries the role."""

    cumulative = False

    def __init__(self, job: Job, asked: OpenAIRequest, model: ModelView) -> None:
        self._job = job
        self._asked = asked
        self._model = model
        self._head = {
            "id": asked.names.shown,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": int(time.time()),
            "model": asked.model or model.name,
        }

    def size(self, choice: Choice, delta: Delta) -> int:
        params = choice.generation.spec.params
        size = logprobs.size(len(delta.logprobs), params.top_logprobs) + len(delta.text)
        if delta.first and self._asked.return_token_ids:
            size += openai_common.TOKEN_ID_BYTES * len(choice.generation.spec.token_ids)
        return size

    def events(self, choice: Choice, delta: Delta) -> Iterable[object]:
        if delta.first:
            opening = {"role": "assistant", "content": ""}
            chunk = self._chunk({"index": choice.index, "delta": opening} | _open())
            yield chunk | self._prompt_ids()
        content = {"content": delta.text} if delta.text or delta.finish is None else {}
        yield self._chunk({"index": choice.index, "delta": content} | self._rest(choice, delta))

    def last_events(self) -> Iterable[object]:
        if self._asked.include_usage:
            yield self._head | {"choices": [], "usage": openai_common.usage(self._job)}

    def body(self) -> object:
        choices = []
        for choice in self._job.generations[0].choices:
            delta = choice.take()
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            head = {"index": choice.index, "message": message}
            choices.append(head | self._rest(choice, delta))
        whole = self._head | {"choices": choices, "usage": openai_common.usage(self._job)}
        return whole | self._prompt_ids()

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._asked.return_token_ids:
            return {}
        return {"prompt_token_ids": self._job.generations[0].spec.token_ids.tolist()}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._head | {"choices": [choice]}
        return chunk | openai_common.chunk_usage(self._asked, self._job)

    def _rest(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": None}
        if choice.generation.spec.params.logprobs:
            rest["logprobs"] = logprobs.chat(self._model.text, delta.logprobs)
        if self._asked.return_token_ids:
            rest["token_ids"] = delta.token_ids
        return rest | openai_common.ending(choice, delta.finish)


def _open() -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": None}
