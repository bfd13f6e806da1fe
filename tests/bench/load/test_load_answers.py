"""Answers are read from the bytes that came, whatever a server sends."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from pd.bench.load.answers import Answer, read_answer
from pd.bench.load.endpoints import Chat, Completions, NativeGenerate
from pd.bench.load.measures import summarize_records
from pd.bench.load.reception import Reception
from pd.bench.load.records import Record

if TYPE_CHECKING:
    from pd.bench.load.endpoints import Endpoint

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def data(event: Any, end: str = "\n\n") -> bytes:
    text = event if isinstance(event, str) else json.dumps(event)
    return f"data: {text}{end}".encode()


def text(value: str, **usage: int) -> dict[str, Any]:
    event: dict[str, Any] = {"choices": [{"index": 0, "text": value}]}
    return event | ({"usage": usage} if usage else {})


def streamed(*events: Any, endpoint: Endpoint | None = None) -> Answer:
    """The answer of a stream whose n-th event came at second n."""
    pieces = [(float(n), chunk(data(event))) for n, event in enumerate(events, 1)]
    pieces[0] = (pieces[0][0], CHUNKED + pieces[0][1])
    pieces[-1] = (pieces[-1][0], pieces[-1][1] + b"0\r\n\r\n")
    return read_answer(pieces, endpoint or Completions())


def test_without_counts_an_event_with_text_is_a_token() -> None:
    answer = streamed(text("a"), text(""), text("b"), "[DONE]")
    assert (answer.error_kind, answer.times, answer.counts) == (None, [1.0, 3.0], [1, 1])
    assert (answer.text, answer.num_tokens, answer.counted_by) == ("ab", 2, "events")


def test_usage_at_the_end_says_how_many_tokens_there_were() -> None:
    last = {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 9}}
    answer = streamed(text("a"), text("bcd"), last, "[DONE]")
    assert (answer.num_tokens, answer.counts, answer.counted_by) == (5, None, "usage")
    assert (answer.times, answer.prompt_tokens) == ([1.0, 2.0], 9)


def test_running_usage_says_how_many_tokens_each_event_has() -> None:
    answer = streamed(
        text("a", completion_tokens=1),
        text("bc", completion_tokens=4),
        text("", completion_tokens=5),
        "[DONE]",
    )
    assert (answer.times, answer.counts) == ([1.0, 2.0, 3.0], [1, 3, 1])
    assert (answer.num_tokens, answer.counted_by) == (5, "usage")


def test_token_ids_are_counted_even_where_the_text_waits() -> None:
    events = [
        {"choices": [{"index": 0, "text": "", "token_ids": [5]}]},
        {"choices": [{"index": 0, "text": "é", "token_ids": [6, 7]}]},
        {"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]},
    ]
    answer = streamed(*events, "[DONE]")
    assert (answer.ids, answer.counts, answer.times) == ([5, 6, 7], [1, 2], [1.0, 2.0])
    assert (answer.counted_by, answer.finish_reason) == ("token_ids", "length")


def test_chat_counts_reasoning_and_content_but_not_the_role() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    answer = streamed(*events, "[DONE]", endpoint=Chat())
    assert (answer.times, answer.text) == ([2.0, 3.0], "hmyes")


@pytest.mark.parametrize("cumulative", [False, True])
def test_generate_sends_what_is_new_or_all_so_far(cumulative) -> None:
    events, ids = [], []
    for new in ([1], [2, 3], [4]):
        ids += new
        shown = list(ids) if cumulative else new
        meta = {"completion_tokens": len(ids), "prompt_tokens": 8, "cached_tokens": 4}
        meta["stages"] = {"prefill": 0.25}
        events.append({"text": "x" * len(shown), "output_ids": shown, "meta_info": meta})
    answer = streamed(*events, "[DONE]", endpoint=NativeGenerate())
    assert (answer.ids, answer.counts, answer.text) == ([1, 2, 3, 4], [1, 2, 1], "xxxx")
    assert (answer.cached_tokens, answer.stages) == (4, {"prefill": 0.25})


def test_generate_without_ids_that_repeats_its_text() -> None:
    events = [
        {"text": "abc"[:n], "meta_info": {"completion_tokens": n, "finish_reason": None}}
        for n in (1, 3)
    ]
    answer = streamed(*events, "[DONE]", endpoint=NativeGenerate())
    assert (answer.text, answer.counts) == ("abc", [1, 2])


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([text("a"), {"error": {"message": "the node died"}}], "error event"),
        ([text("a"), "{not json", "[DONE]"], "bad event"),
        (["[]", "[DONE]"], "bad event"),
        ([{"choices": [7]}, "[DONE]"], "bad event"),
        ([{"choices": [{"text": 7}]}, "[DONE]"], "bad event"),
        (["[" * 100_000, "[DONE]"], "bad event"),
        (["[DONE]"], "empty"),
        ([text("a"), text("b")], "cut"),
    ],
)
def test_streams_that_fail_say_how(events, kind) -> None:
    answer = streamed(*events)
    assert answer.error_kind == kind
    assert answer.error


def generated(**fields: Any) -> str:
    """An event of ``/generate``, whose fields may be no valid JSON for others than Python."""
    meta = {"completion_tokens": 1, "finish_reason": None} | fields.pop("meta", {})
    return json.dumps({"text": "a", "meta_info": meta} | fields)


HUGE = 10**400
NUMBERS = [
    (Completions(), text("a", completion_tokens=HUGE)),
    (Completions(), text("a", prompt_tokens=1 << 53)),
    (Completions(), {"choices": [{"text": "a"}], "usage": {
        "prompt_tokens_details": {"cached_tokens": HUGE}}}),
    (Completions(), '{"choices": [{"text": "a", "token_ids": [1e400]}]}'),
    (Completions(), '{"choices": [{"text": "a", "token_ids": [NaN]}]}'),
    (NativeGenerate(), '{"text": "a", "output_ids": [-1e400], "meta_info": {}}'),
    (NativeGenerate(), generated(meta={"completion_tokens": HUGE})),
    *[
        (NativeGenerate(), generated(meta={"stages": {"prefill": seconds}}))
        for seconds in (HUGE, -HUGE, float("nan"), float("inf"), "nan", "-inf", 1e300)
    ],
]  # fmt: skip
TEXTS = [(NativeGenerate(), generated(text=each)) for each in (5, True, ["a"], {"a": "b"})]


@pytest.mark.parametrize(("endpoint", "event"), [*NUMBERS, *TEXTS])
@pytest.mark.parametrize("place", [0, 1])
def test_events_that_make_no_sense_cost_their_own_answer(endpoint, event, place) -> None:
    good = text("a") if isinstance(endpoint, Completions) else generated()
    events: list[Any] = [good, good]
    events[place] = event
    answer = streamed(*events, "[DONE]", endpoint=endpoint)
    assert answer.error_kind == "bad event"
    assert answer.num_tokens == place, "what came before counts"


def test_the_largest_numbers_have_finite_measures() -> None:
    most = (1 << 53) - 1
    meta = {"completion_tokens": most, "prompt_tokens": most, "stages": {"prefill": float(most)}}
    answer = streamed(generated(meta=meta), "[DONE]", endpoint=NativeGenerate())
    assert (answer.error_kind, answer.num_tokens) == (None, most)
    records = [
        Record(session=n, end=2.0, prompt_tokens=answer.prompt_tokens,
               output_tokens=answer.num_tokens, tokens=answer.counts,
               stages=answer.stages if n else {"prefill": 0.0})
        for n in range(3)
    ]  # fmt: skip
    json.dumps(summarize_records(records), allow_nan=False)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "no answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not http"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "http 429"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}", "not a stream"),
        (CHUNKED + b"zz\r\nnonsense", "cut"),
        (CHUNKED + b"-5\r\nnonsense", "cut"),
        (PLAIN + b"\xff\xfe\x00", "cut"),
        (b"HTTP/1.1 500 X\r\nContent-Length: %s\r\n\r\nno" % (b"9" * 5000), "http 500"),
    ],
)
def test_answers_that_are_none_say_how(raw, kind) -> None:
    assert read_answer([(1.0, raw)] if raw else [], Completions()).error_kind == kind


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("chunked", [True, False])
def test_an_event_has_come_with_its_last_byte_however_the_bytes_are_cut(end, chunked) -> None:
    events = [data(text(letter), end) for letter in "abcdefgh"] + [data("[DONE]", end)]
    comment = f": ping{end}".encode()
    parts = [comment + event for event in events]
    raw = (CHUNKED if chunked else PLAIN) + b"".join(chunk(p) if chunked else p for p in parts)
    raw += b"0\r\n\r\n" if chunked else b""
    rng = random.Random(5)
    cuts = sorted(rng.sample(range(1, len(raw)), 60))
    pieces = [
        (float(stop), raw[start:stop])
        for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True)
    ]
    answer = read_answer(pieces, Completions())
    assert (answer.error_kind, answer.text) == (None, "abcdefgh")
    for event, at in zip(events, answer.times, strict=False):
        ends = raw.index(event) + len(event)
        assert at == min(stop for stop, _ in pieces if stop >= ends)


def test_a_reception_ends_with_the_answer_though_the_connection_stays_open() -> None:
    class Transport(asyncio.Transport):
        def abort(self) -> None:
            pass

    async def ends(*parts: bytes) -> list[bool]:
        reception = Reception()
        reception.connection_made(Transport())
        found = []
        for part in parts:
            reception.data_received(part)
            found.append(reception.ended.done())
        return found

    stream = chunk(data(text("0\r\n\r\n")))
    assert asyncio.run(ends(CHUNKED, stream, b"0\r\n\r\n")) == [False, False, True]
    assert asyncio.run(ends(CHUNKED + stream + b"0\r\n\r\n")) == [True]
    refused = b"HTTP/1.1 400 X\r\ncontent-length: 4\r\n\r\n"
    assert asyncio.run(ends(refused, b"no", b"pe")) == [False, False, True]


def test_an_answer_without_end_is_cut(monkeypatch) -> None:
    monkeypatch.setattr("pd.bench.load.reception.MAX_ANSWER_BYTES", 1000)

    class Transport(asyncio.Transport):
        def abort(self) -> None:
            pass

    async def receive() -> str | None:
        reception = Reception()
        reception.connection_made(Transport())
        for _ in range(20):
            reception.data_received(b"x" * 100)
        return reception.cut_reason

    assert asyncio.run(receive()) == "too long"
