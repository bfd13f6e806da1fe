"""What a proxy believes to be cached at a node, by the node's reports and by its own guess."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from predicted_prefixes import PAGE, ReportingCache, events, predict, tokens

from pd.core.messages import PREFIXES_UNKNOWN, PrefixEvents
from pd.proxy.nodes.prefix_tree import PrefixTree
from pd.proxy.nodes.reported_prefixes import ReportedPrefixes
from pd.proxy.routing.demand import Prompt
from pd.radix.prefix_hashes import hash_namespace, hash_pages, hash_prompt, to_numbers


def test_a_report_tells_what_is_cached_of_a_prompt() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    node.use(tokens(*range(20)), "salt")
    report = node.report()
    assert report is not None
    known.apply_events(report)
    assert known.count_cached(tokens(*range(18)), "salt") == 16
    assert known.count_cached(tokens(*range(8), 99, *range(9, 20)), "salt") == 8
    assert known.count_cached(tokens(*range(20)), "") == 0, "tenants' salts are in the hashes"
    assert known.num_tokens == 20


@pytest.mark.parametrize("length", [16, 17, 18, 19, 20, 21])
def test_prompts_are_matched_by_memory_that_is_made_once(length: int) -> None:
    prompt = Prompt(tokens(*range(length)), "salt")
    for known in (ReportedPrefixes(PAGE, 100), PrefixTree(PAGE, 400)):
        begin = Prompt(tokens(*range(20)), "salt")
        known.add_tokens(begin.token_ids, "salt", begin.data)
        held = known.count_cached(prompt.token_ids, "salt", prompt.data)
        assert held == known.count_cached(prompt.token_ids, "salt") == min(length, 20) // 4 * 4
        other = Prompt(prompt.token_ids[1:], "salt")
        assert known.count_cached(other.token_ids, "salt", other.data) == 0


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_a_conversation_that_goes_on_is_a_prompt_with_its_answer(length: int) -> None:
    prompt = Prompt(tokens(*range(7)), "salt").followed_by([9] * length)
    assert prompt.token_ids.tolist() == [*range(7), *[9] * length]
    assert prompt.data == prompt.token_ids.tobytes()
    assert (prompt.token_ids.dtype, prompt.namespace) == (np.int32, "salt")


@pytest.mark.parametrize("length", [39, 40, 41, 43, 44, 400])
def test_a_guess_is_the_same_with_memory_that_is_made_once(length: int) -> None:
    """The pool holds ten pages, and prompts may end within a page or be longer than it."""
    with_memory, without = PrefixTree(PAGE, 10 * PAGE), PrefixTree(PAGE, 10 * PAGE)
    for start in (0, 7, 0):
        prompt = Prompt(tokens(*range(start, start + length)), "")
        with_memory.add_tokens(prompt.token_ids, "", prompt.data)
        without.add_tokens(prompt.token_ids, "")
        assert with_memory.count_cached(prompt.token_ids, "") == without.count_cached(
            prompt.token_ids, ""
        )
        assert with_memory.num_tokens == without.num_tokens <= 10 * PAGE


def test_what_was_just_sent_counts_until_it_is_reported_or_evicted() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    known.add_tokens(tokens(*range(20)), "")
    assert known.count_cached(tokens(*range(20)), "") == 20
    node.use(tokens(*range(20)))
    node.radix.evict_pages(2)
    report = node.report()
    assert report is not None
    known.apply_events(report)
    assert known.count_cached(tokens(*range(20)), "") == 12


def test_prompts_that_begin_alike_have_the_hashes_that_each_has_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [tokens(), tokens(1, 2, 3)]
    for _ in range(500):
        earlier = prompts[rng.integers(len(prompts))]
        begin = earlier[: rng.integers(len(earlier) + 1)]
        data = np.concatenate([begin, tokens(*rng.integers(0, 3, rng.integers(20)))]).tobytes()
        prompts = [*prompts[-3:], np.frombuffer(data, np.int32)]
        namespace, page_size = str(rng.integers(2)), int(rng.integers(1, 3))
        page_bytes = 4 * page_size
        whole = data[: len(data) // page_bytes * page_bytes]
        alone = to_numbers(hash_pages(hash_namespace(namespace), whole, page_bytes))
        assert hash_prompt(data, namespace, page_size) == alone


def test_a_prompt_that_grows_keeps_its_beginning_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation's pages were noted at different times, the first ones long ago."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    known = ReportedPrefixes(PAGE, 10_000)
    prompt = tokens(*range(40 * PAGE))
    for pages in range(10, 41, 10):
        known.add_tokens(prompt[: pages * PAGE], "")
        now[0] += 0.4
    now[0] = 1000.0 + 5.5  # the first ones were noted so long before, if never since
    assert known.count_cached(prompt, "") == len(prompt)


def test_many_answers_hash_and_note_the_pages_of_their_prompt_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop stands still meanwhile, for milliseconds where a prompt is long."""
    hashed = []

    def count(last: bytes, data: bytes, page_bytes: int) -> bytes:
        hashed.append(len(data) // page_bytes)
        return hash_pages(last, data, page_bytes)

    class Noted(dict[int, float]):
        times = 0

        def __setitem__(self, page: int, sent: float) -> None:
            self.times += 1
            super().__setitem__(page, sent)

    monkeypatch.setattr("pd.radix.prefix_hashes.hash_pages", count)
    monkeypatch.setattr("pd.radix.prefix_hashes._recent", deque(maxlen=4))
    for name in ("_FRESH_SECONDS", "_EXPECTED_SECONDS"):
        monkeypatch.setattr(f"pd.proxy.nodes.reported_prefixes.{name}", 600.0)
    known = ReportedPrefixes(PAGE, 10_000)
    known._expected = noted = Noted()
    prompt = tokens(*range(4000))
    for number in range(64):
        answer = Prompt(np.concatenate([prompt, tokens(*[number] * 10 * PAGE)]), "")
        assert known.count_cached(answer.token_ids, "", answer.data) == (
            len(prompt) if number else 0
        )
        known.add_tokens(answer.token_ids, "", answer.data)
        assert known.count_cached(answer.token_ids, "", answer.data) == len(answer.token_ids)
    assert (sum(hashed), noted.times) == (4000 // PAGE + 64 * 10,) * 2


def test_no_batch_is_taken_after_a_lost_one_until_a_snapshot_comes() -> None:
    known = ReportedPrefixes(PAGE, 100)
    node = ReportingCache(100, known)
    node.use(tokens(*range(100, 120)))
    node.snapshot()
    node.use(tokens(*range(20)))
    node.report()  # lost
    node.use(tokens(*range(50, 70)))
    late = node.report()
    assert late is not None
    known.apply_events(late)
    assert known.number == PREFIXES_UNKNOWN
    assert known.count_cached(tokens(*range(50, 70)), "") == 0
    assert known.count_cached(tokens(*range(100, 120)), "") == 20
    node.snapshot()
    assert known.number == node.number
    assert (
        known.count_cached(tokens(*range(20)), "")
        == known.count_cached(tokens(*range(50, 70)), "")
        == 20
    )


def test_a_node_that_reports_more_than_its_pool_takes_no_more_memory() -> None:
    known = ReportedPrefixes(PAGE, 10)
    many = np.arange(1000, dtype="<u8").tobytes()
    known.apply_events(events(3, stored=many, snapshot=True))
    assert known.num_tokens == 10 * PAGE
    for start in range(0, 10_000, 100):
        known.add_tokens(tokens(*range(start, start + 100)), "")
    assert len(known._expected) <= 10


@pytest.mark.parametrize("fields", [{"stored": b"1234567"}, {"removed": b"x"}, {"number": -1}])
def test_a_malformed_report_is_refused(fields: dict[str, Any]) -> None:
    whole = {"type": "PrefixEvents", "to": "p", "sender": "n", "number": 1} | fields
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=PrefixEvents)


def test_reports_predict_cached_tokens_under_eviction_and_a_guess_does_not(seed: int) -> None:
    shares = predict(2_500, seed)
    print(f"seed {seed}: exactly right: {shares}")
    assert shares.reports >= 0.95 > shares.guess
