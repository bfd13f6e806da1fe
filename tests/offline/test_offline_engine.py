"""Programs of the language on an offline model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from offline_settings import SETTINGS

import pd.lang as pl
from pd import Engine
from pd.core.errors import UsageError
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pd import LLM


@pl.function
def describe(s: Any, subject: str) -> None:
    s += f"The {subject} node"
    s += pl.gen("work", max_tokens=8, temperature=0)
    s += " and it is"
    s += pl.select("kind", choices=[" fast", " slow"])


def test_programs_give_the_same_texts_here_as_over_http(llm: LLM, url: str) -> None:
    subjects = ["prefill", "decode", "unified"]
    here = describe.run_batch([{"subject": s} for s in subjects], backend=llm)
    there = describe.run_batch([{"subject": s} for s in subjects], backend=pl.RuntimeEndpoint(url))
    for one, other in zip(here, there, strict=True):
        assert one.error() is None
        assert one.text() == other.text()
        assert one["kind"] in (" fast", " slow")


@pl.function
def recite(s: Any) -> None:
    s += "The prefill node" + pl.gen("work", max_tokens=400, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("name", ["llm", "remote"])
def test_a_streamed_program_yields_its_text_in_pieces(
    name: str, request: pytest.FixtureRequest
) -> None:
    backend = request.getfixturevalue(name)
    whole = recite.run(backend=backend)["work"]
    # Several times, because a consumer that is starved for a while finds everything in one piece.
    for _ in range(5):
        state = recite.run(backend=backend, stream=True)
        pieces = list(state.text_iter("work"))
        assert "".join(pieces) == whole
        if len(pieces) > 1:
            return
    pytest.fail("no text came in pieces")


def test_an_aborted_stream_ends_at_once(llm: LLM) -> None:
    service = llm.endpoint._service
    body = {"text": "Hello", "rid": "mine", "stream": True}
    body["sampling_params"] = {"max_new_tokens": 5000, "ignore_eos": True}
    events = service.stream(body)
    next(events)
    service.abort("mine")
    last = list(events)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    service.abort("mine")  # it is gone, and nobody minds


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    service = llm.endpoint._service
    body = {"text": "Hello", "rid": "closed", "stream": True}
    body["sampling_params"] = {"max_new_tokens": 5000, "ignore_eos": True}
    events = service.stream(body)
    next(events)
    events.close()
    # The name is free, so the request has ended.
    body |= {"stream": False, "sampling_params": {"max_new_tokens": 1}}
    assert service.generate(body)["meta_info"]["completion_tokens"] == 1


@pytest.mark.full
def test_an_engine_of_its_own_runs_programs_and_ends(llm: LLM) -> None:
    (expected,) = describe.run_batch([{"subject": "prefill"}], backend=llm)
    with Engine(EMBEDDED_MODEL, **SETTINGS) as engine:
        state = describe.run(subject="prefill", backend=engine)
        assert state.text() == expected.text()
        pl.flush_cache(backend=engine)
    with pytest.raises(UsageError, match="the model is closed"):
        engine.endpoint.get_server_info()


def test_the_service_describes_model_and_server(llm: LLM, url: str) -> None:
    assert llm.endpoint.get_model_name() == pl.RuntimeEndpoint(url).get_model_name()
    assert llm.endpoint.get_server_info()["context_length"] == 8192
