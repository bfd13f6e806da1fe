"""Each position is delivered once and in order, whoever sent it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd.core.errors import NodeFailedError
from pd.core.messages import Finish, Output, TokenLogprobs
from pd.proxy.dispatch.positions import TokenMerger

ROOM = bytes(16)


def out(position: int, *tokens: int, finish: Finish | None = None) -> Output:
    return Output(room=ROOM, index=0, position=position, token_ids=list(tokens), finish=finish)


def merger(max_tokens: int = 100) -> TokenMerger:
    return TokenMerger(max_tokens, vocab_size=1000, with_logprobs=False)


def delivered(merger: TokenMerger, output: Output, first_may_come: bool = False) -> list[int]:
    new = merger.merge_output(output, first_may_come=first_may_come)
    return [token for part in new for token in part.token_ids]


def test_token_1_repeated_by_the_decode_node_is_dropped() -> None:
    m = merger()
    assert delivered(m, out(0, 7)) == [7]
    assert delivered(m, out(0, 7, 8)) == [8]
    assert delivered(m, out(1, 8)) == []
    assert delivered(m, out(2, 9)) == [9]


def test_the_decode_node_may_be_first() -> None:
    m = merger()
    assert delivered(m, out(0, 7, 8), first_may_come=True) == [7, 8]
    assert delivered(m, out(0, 7)) == []


def test_later_tokens_wait_for_token_1() -> None:
    m = merger()
    end = Finish("length")
    assert delivered(m, out(1, 8), first_may_come=True) == []
    assert delivered(m, out(2, 9, finish=end), first_may_come=True) == []
    assert m.merge_output(out(0, 7), first_may_come=False)[-1].finish == end
    assert m.token_ids == [7, 8, 9]


@pytest.mark.parametrize(
    ("outputs", "first_may_come"),
    [
        ([out(1, 8)], False),
        ([out(2, 9)], True),
        ([out(0, 7), out(2, 9)], False),
        ([out(1, 8), out(3, 9)], True),
    ],
)
def test_a_gap_that_cannot_close_is_an_error(outputs: list[Output], first_may_come: bool) -> None:
    m = merger()
    with pytest.raises(NodeFailedError, match="missing"):
        for output in outputs:
            m.merge_output(output, first_may_come=first_may_come)


def test_nodes_that_disagree_are_an_error() -> None:
    m = merger()
    m.merge_output(out(0, 7), first_may_come=False)
    with pytest.raises(NodeFailedError, match="disagree"):
        m.merge_output(out(0, 8), first_may_come=False)


def test_no_token_is_kept_of_nodes_that_disagree_about_what_came_early() -> None:
    """Those that go on begin behind the tokens that were returned."""
    m = merger()
    m.merge_output(out(1, 8), first_may_come=True)
    m.merge_output(out(2, 9), first_may_come=True)
    with pytest.raises(NodeFailedError, match="disagree"):
        m.merge_output(out(0, 7, 8, 5), first_may_come=False)
    assert m.token_ids == []
    m.forget_early()
    assert delivered(m, out(0, 7, 8, 5)) == [7, 8, 5]


@pytest.mark.parametrize(
    "output", [out(-1, 5), out(0, -1), out(0, 1000), out(0, 1, 2, 3), out(3, 1)]
)
def test_nonsense_is_an_error(output: Output) -> None:
    with pytest.raises(NodeFailedError):
        merger(max_tokens=2).merge_output(output, first_may_come=True)


def test_log_probabilities_are_as_many_as_tokens() -> None:
    m = TokenMerger(10, None, with_logprobs=True)
    good = out(0, 7)
    good.logprobs = [TokenLogprobs(7, -1.0)]
    assert m.merge_output(good, first_may_come=False)[0].logprobs == good.logprobs
    with pytest.raises(NodeFailedError, match="log probabilities"):
        m.merge_output(out(1, 8), first_may_come=False)


@pytest.mark.parametrize(
    "entry",
    [
        TokenLogprobs(1 << 40, -1.0),
        TokenLogprobs(-1, -1.0),
        TokenLogprobs(7, -1.0, [7, 8], [-1.0]),
        TokenLogprobs(7, -1.0, [], [-1.0]),
        TokenLogprobs(7, -1.0, [1000], [-1.0]),
        TokenLogprobs(7, -1.0, [7, -8], [-1.0, -2.0]),
    ],
    ids=str,
)
def test_log_probabilities_are_of_tokens_that_there_are(entry: TokenLogprobs) -> None:
    m = TokenMerger(10, 1000, with_logprobs=True)
    bad = out(0, 7)
    bad.logprobs = [entry]
    with pytest.raises(NodeFailedError, match=r"vocabulary|likeliest"):
        m.merge_output(bad, first_may_come=False)
    assert m.token_ids == []
    # Those that nobody asked for are not looked at.
    assert delivered(merger(), bad) == [7]


def test_a_finish_without_a_token_ends_the_choice() -> None:
    m = merger()
    m.merge_output(out(0, 7), first_may_come=False)
    (new,) = m.merge_output(out(1, finish=Finish("length")), first_may_come=False)
    assert new.finish == Finish("length")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=20))
def test_overlapping_messages_never_repeat_or_skip(spans: list[tuple[int, int]]) -> None:
    truth = list(range(100, 114))
    m = merger()
    got: list[int] = []
    for start, length in spans:
        try:
            got += delivered(m, out(start, *truth[start : start + length]))
        except NodeFailedError:
            assert start > len(got)
        assert got == truth[: len(got)]
