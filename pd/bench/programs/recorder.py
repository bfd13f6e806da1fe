"""Records the requests that programs send, as the prompts that nodes see."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pd.bench.programs.optimum import CacheRequest
from pd.lang.native import NativeBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pd.lang.backend import NativeService, ProgramPrompt

    # Tokenizes a text. The second argument says whether to put special tokens before it.
    Tokenize = Callable[[str, bool], list[int]]


class RecordedCall:
    """A body of ``POST /generate``, and its answer; None before that, or if there is none."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.answer: Any = None


class RecordingService:
    """A native service that records every body with its answer. All threads may call it."""

    def __init__(self, service: NativeService) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._calls: list[RecordedCall] = []

    def generate(self, body: Mapping[str, Any]) -> Any:
        call = self._note_call(body)
        call.answer = self._service.generate(body)
        return call.answer

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        call = self._note_call(body)
        output_ids: list[int] = []
        for event in self._service.stream(body):
            earlier = output_ids if body.get("incremental") else []
            output_ids = earlier + event["output_ids"]
            yield event
            call.answer = event | {"output_ids": output_ids}

    def _note_call(self, body: Mapping[str, Any]) -> RecordedCall:
        call = RecordedCall(body)
        with self._lock:
            self._calls.append(call)
        return call

    def take_calls(self) -> list[RecordedCall]:
        """Return the answered calls so far, in the order in which they were sent; forget them."""
        with self._lock:
            calls, self._calls = self._calls, []
        return [call for call in calls if call.answer is not None]

    def abort(self, rid: str) -> None:
        self._service.abort(rid)

    def flush_cache(self) -> None:
        self._service.flush_cache()

    def describe_model(self) -> dict[str, Any]:
        return self._service.describe_model()

    def describe_tokenizer(self) -> dict[str, Any]:
        return self._service.describe_tokenizer()

    def describe_server(self) -> dict[str, Any]:
        return self._service.describe_server()


class HintlessBackend(NativeBackend):
    """A backend that does not send the prefix of forks and batches first."""

    def cache_prefix(self, prompt: ProgramPrompt, rid: str) -> None:
        """Do nothing."""


def list_requests(calls: Sequence[RecordedCall], tokenize: Tokenize) -> list[CacheRequest]:
    """List the prompts that nodes saw for calls, one for each option of a ``select``."""
    requests: list[CacheRequest] = []
    for call in calls:
        if "choices" in call.body:
            requests += _list_options(call.body, tokenize)
        else:
            requests.append(_read_call(call, tokenize))
    return requests


def _read_call(call: RecordedCall, tokenize: Tokenize) -> CacheRequest:
    body, answer = call.body, call.answer
    token_ids = tokenize(body["text"], body.get("add_special_tokens", True))
    reusable = len(token_ids) - 1
    start = body.get("logprob_start_len", -1)
    if body.get("return_logprob") and 0 <= start < len(token_ids):
        reusable = min(reusable, max(0, start - 1))
    answers = answer if isinstance(answer, list) else [answer]
    return CacheRequest(tuple(token_ids), reusable, tuple(map(_list_computed, answers)))


def _list_computed(answer: Mapping[str, Any]) -> tuple[int, ...]:
    """List the tokens of an answer whose KV was computed: all but the last one.

    At a stop string the node may be ahead of the proxy, which finds it. Then we count all tokens.
    """
    finish = answer["meta_info"].get("finish_reason") or {}
    is_ahead = isinstance(finish.get("matched"), str)
    output_ids = answer["output_ids"]
    return tuple(output_ids if is_ahead else output_ids[:-1])


def _list_options(body: Mapping[str, Any], tokenize: Tokenize) -> list[CacheRequest]:
    """List the prompts of a ``select``, as :mod:`pd.proxy.api.choices_api` makes them.

    Log probabilities of an option's tokens need the logits from the token before it on.
    """
    special = body.get("add_special_tokens", True)
    prompt = tokenize(body["text"], special)
    conditional, unconditional = [], []
    for choice in body["choices"]:
        token_ids = tokenize(body["text"] + choice, special)
        shared = _count_shared(prompt, token_ids)
        if not 0 < shared < len(token_ids):
            token_ids, shared = prompt + tokenize(choice, False), len(prompt)
        conditional.append(CacheRequest(tuple(token_ids), max(0, shared - 1)))
        unconditional.append(CacheRequest(tuple(token_ids[shared:]), 0))
    if body["choices_method"] == "unconditional_likelihood":
        return conditional + unconditional
    return conditional


def _count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
