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


class RecordingService:
    """A native service that records every body with its answer. All threads may call it.

    Attributes:
        calls: body and answer of each request that was answered; for a stream, the whole answer.
    """

    def __init__(self, service: NativeService) -> None:
        self._service = service
        self._lock = threading.Lock()
        self.calls: list[tuple[Mapping[str, Any], Any]] = []

    def generate(self, body: Mapping[str, Any]) -> Any:
        answer = self._service.generate(body)
        self._record(body, answer)
        return answer

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        output_ids: list[int] = []
        last: dict[str, Any] = {"meta_info": {}}
        for event in self._service.stream(body):
            if body.get("incremental"):
                output_ids += event["output_ids"]
            else:
                output_ids = event["output_ids"]
            last = event
            yield event
        self._record(body, last | {"output_ids": output_ids})

    def _record(self, body: Mapping[str, Any], answer: Any) -> None:
        with self._lock:
            self.calls.append((body, answer))

    def take_calls(self) -> list[tuple[Mapping[str, Any], Any]]:
        """Return the calls so far, and forget them."""
        with self._lock:
            calls, self.calls = self.calls, []
        return calls

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


def list_requests(
    calls: Sequence[tuple[Mapping[str, Any], Any]], tokenize: Tokenize
) -> list[CacheRequest]:
    """List the prompts that nodes saw for calls, one for each option of a ``select``."""
    return [
        request
        for body, answer in calls
        for request in (
            _list_options(body, tokenize)
            if "choices" in body
            else [_read_call(body, answer, tokenize)]
        )
    ]


def _read_call(body: Mapping[str, Any], answer: Any, tokenize: Tokenize) -> CacheRequest:
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
