"""The recorder knows which prompts nodes get for each kind of request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd.bench.programs.optimum import CacheRequest
from pd.bench.programs.recorder import RecordingService, list_requests

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STOPPED = {"type": "stop", "matched": "!"}
ENDED = {"type": "stop", "matched": 2}
CUT = {"type": "length"}
# Two letters that are one token, so that a choice may change the end of its prompt.
JOINED = {"xy": 0}


def tokenize(text: str, add_special_tokens: bool) -> list[int]:
    """Tokenize a text by letters, but for :data:`JOINED`. 1 is the special token before it."""
    tokens = [1] if add_special_tokens else []
    while text:
        length = 2 if text[:2] in JOINED else 1
        tokens.append(JOINED.get(text[:length], ord(text[0])))
        text = text[length:]
    return tokens


def answer_by(output_ids: list[int], finish: dict[str, Any]) -> dict[str, Any]:
    return {"output_ids": output_ids, "meta_info": {"finish_reason": finish}}


class ScriptedService:
    """Gives answers in turn, and streams each in events of one token."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def generate(self, body: Mapping[str, Any]) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        answer = self._answers.pop(0)
        tokens = answer["output_ids"]
        for number in range(len(tokens)):
            start = number if body.get("incremental") else 0
            yield answer | {"output_ids": tokens[start : number + 1]}


def record(body: dict[str, Any], answer: Any) -> list[CacheRequest]:
    service = RecordingService(ScriptedService(answer))  # type: ignore[arg-type]
    if body.get("stream"):
        list(service.stream(body))
    else:
        service.generate(body)
    return list_requests(service.take_calls(), tokenize)


@pytest.mark.parametrize(("finish", "kept"), [(CUT, (7, 8)), (ENDED, (7, 8)), (STOPPED, (7, 8, 9))])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "incremental": True}])
def test_the_last_token_of_an_answer_is_computed_only_before_a_stop_string_is_found(
    finish: dict[str, Any], kept: tuple[int, ...], more: dict[str, bool]
) -> None:
    (request,) = record({"text": "ab"} | more, answer_by([7, 8, 9], finish))
    assert request == CacheRequest((1, 97, 98), 2, (kept,))


def test_hints_and_answers_to_one_prompt() -> None:
    body = {"text": "ab", "add_special_tokens": False}
    assert record(body, answer_by([], CUT)) == [CacheRequest((97, 98), 1, ((),))]
    both = [answer_by([7, 8], CUT), answer_by([9], CUT)]
    assert record(body, both) == [CacheRequest((97, 98), 1, ((7,), ()))]


def test_tokens_with_log_probabilities_are_not_reused() -> None:
    body = {"text": "abcd", "return_logprob": True, "logprob_start_len": 3}
    (request,) = record(body, answer_by([7], CUT))
    assert request.reusable == 2
    (request,) = record(body | {"logprob_start_len": -1}, answer_by([7], CUT))
    assert request.reusable == 4


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood"])
def test_each_option_is_a_prompt(method: str) -> None:
    body = {"text": "abx", "choices": ["c", "yz", ""], "choices_method": method}
    found = record(body, answer_by([], ENDED))
    expected = [
        CacheRequest((1, 97, 98, 120, 99), 3),
        # The option's first token also has the end of the prompt.
        CacheRequest((1, 97, 98, 0, 122), 2),
    ]
    assert found[:2] == expected
    alone = [CacheRequest((99,), 0), CacheRequest((0, 122), 0)]
    assert found[3:5] == (alone if method == "unconditional_likelihood" else [])


def test_calls_keep_the_order_in_which_they_were_sent_and_failed_ones_are_dropped() -> None:
    service = RecordingService(
        ScriptedService(answer_by([7], CUT), ValueError(), answer_by([8], CUT))  # type: ignore[arg-type]
    )
    slow = service.stream({"text": "a", "stream": True})
    next(slow)
    with pytest.raises(ValueError):
        service.generate({"text": "b"})
    service.generate({"text": "c"})
    list(slow)
    calls = service.take_calls()
    assert [call.body["text"] for call in calls] == ["a", "c"]
    assert service.take_calls() == []
