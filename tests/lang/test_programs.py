"""Programs on a running pd with the embedded model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pydantic
import pytest

import pd.lang as pl

if TYPE_CHECKING:
    from cluster import Cluster

    from pd.lang.choices import ChoicesDecision

pytestmark = pytest.mark.usefixtures("default_backend")

LONG = "A prefix that all branches share, and that is longer than a few pages of the cache. " * 3


def generate(url: str, text: str, **sampling: Any) -> Any:
    body = {"text": text, "sampling_params": {"temperature": 0, **sampling}}
    response = httpx.post(f"{url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_generation_is_that_of_plain_generate(url: str) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "Q: What is pd?\nA:" + pl.gen("answer", 12, stop="\n", temperature=0)

    state = program.run()
    expected = generate(url, "Q: What is pd?\nA:", max_new_tokens=12, stop="\n")
    assert state["answer"] == expected["text"]
    meta = state.get_meta_info("answer")
    assert meta["completion_tokens"] == expected["meta_info"]["completion_tokens"]


def test_a_chat_has_the_prompt_of_the_servers_template(url: str) -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.system("Be brief.")
        with s.user():
            s += "What is the KV cache?"
        s += pl.assistant(pl.gen("first", 8, temperature=0))
        s += pl.user_begin() + "And pd?" + pl.user_end()
        s += pl.assistant_begin()

    state = program.run()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the KV cache?"},
        {"role": "assistant", "content": state["first"]},
        {"role": "user", "content": "And pd?"},
    ]
    assert state.messages() == messages
    asked = [{"messages": messages}, {"prompt": state.text()}]
    chat, text = (httpx.post(f"{url}/tokenize", json=body).json() for body in asked)
    assert chat["tokens"] == text["tokens"]


def test_branches_find_their_prefix_in_the_cache() -> None:
    pl.flush_cache()

    @pl.function
    def program(s: Any) -> None:
        s += LONG
        forks = s.fork(3)
        forks += lambda i: f"{i}." + pl.gen("x", 4)
        for fork in forks.states:
            meta = fork.get_meta_info("x")
            assert meta["cached_tokens"] > 0.5 * meta["prompt_tokens"]

    assert program.run().error() is None


def test_the_prefix_of_a_fork_is_leased_if_wanted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = cluster.unified

    def count_leases() -> int:
        return int(httpx.get(f"{node.url}/server_info").json()["prefix_leases"]["leases"])

    @pl.function
    def program(s: Any) -> None:
        s += LONG + "Leased."
        s.fork(2).join()

    program.run().sync()
    before = count_leases()
    monkeypatch.setattr(pl.global_config, "prefix_lease", 0.5)
    program.run().sync()
    assert count_leases() == before + 1


def test_a_pattern_ends_an_answer() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.user("What is the KV cache?")
        s += pl.assistant(pl.gen("a", stop_regex=["ea[a-z]lier"], temperature=0))

    assert program.run()["a"] == "The KV cache holds the keys and values of "


METHODS = {
    "token_length_normalized": pl.token_length_normalized,
    "greedy_token": pl.greedy_token_selection,
    "unconditional_likelihood": pl.unconditional_likelihood_normalized,
}


@pytest.mark.parametrize("name", METHODS)
def test_a_selection_is_that_of_the_server(url: str, name: str) -> None:
    choices = ["the KV cache", "the", "decode nodes", "a cat"]

    @pl.function
    def program(s: Any) -> None:
        s += "A prefill node sends " + pl.select("a", choices, choices_method=METHODS[name]) + "."

    state = program.run()
    body = {"text": "A prefill node sends ", "choices": choices, "choices_method": name}
    expected = httpx.post(f"{url}/generate", json=body).json()
    assert state["a"] == expected["text"]
    assert state.text().endswith(expected["text"] + ".")
    meta = state.get_meta_info("a")
    scored = expected["meta_info"]["choices"]
    assert meta["scores"] == pytest.approx([option["score"] for option in scored])
    means = [option["normalized_logprob"] for option in scored]
    assert meta["normalized_prompt_logprobs"] == pytest.approx(means)


def test_a_program_may_bring_a_method_of_its_own() -> None:
    class Unlikeliest:
        requires_unconditional_logprobs = True

        def __call__(
            self, *, choices: list[str], normalized_prompt_logprobs: list[float], **given: Any
        ) -> ChoicesDecision:
            from pd.lang.choices import ChoicesDecision

            assert len(given["unconditional_token_logprobs"]) == len(choices)
            worst = normalized_prompt_logprobs.index(min(normalized_prompt_logprobs))
            return ChoicesDecision(choices[worst], {})

    @pl.function
    def program(s: Any) -> None:
        s += "A prefill node sends the " + pl.gen(
            "a", choices=["KV cache", "zebra"], choices_method=Unlikeliest()
        )

    assert program.run()["a"] == "zebra"


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=6)
    size: int = pydantic.Field(ge=0, le=9)


def test_answers_have_the_form_that_is_asked_for() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += "An integer: " + pl.gen_int("int", 6)
        s += "A number: " + pl.gen("float", 6, dtype=float)
        s += "True or False? " + pl.gen("bool", dtype=bool)
        s += "A string: " + pl.gen_string("str", 12)
        s += "Letters: " + pl.gen("regex", regex="[a-c]{3}")
        s += "A city: " + pl.gen("json", json_schema=City)

    state = program.run(temperature=0)
    int(state["int"])
    float(state["float"])
    assert state["bool"] in ("True", "False")
    assert state["str"].startswith('"')
    assert len(state["regex"]) == 3
    City(**json.loads(state["json"]))


def test_one_refused_request_leaves_the_rest_of_a_batch_alone() -> None:
    @pl.function
    def program(s: Any, limit: int) -> None:
        s += "pd is" + pl.gen("a", limit)

    states = program.run_batch([{"limit": limit} for limit in (2, -5, 3)])
    assert [state.error() is None for state in states] == [True, False, True]
    error = states[1].error()
    assert error is not None
    assert (error.function, error.variable) == ("program", "a")
    assert "max_new_tokens" in str(error)


def test_log_probabilities_are_streamed_once_each() -> None:
    @pl.function
    def program(s: Any) -> None:
        s += pl.user("What is pd?")
        s += pl.assistant(pl.gen("a", 12, return_logprob=True))

    state = program.run(stream=True, temperature=0)
    pieces = list(state.stream_executor.iterate_var("a"))
    entries = [entry for piece in pieces for entry in piece.meta["output_token_logprobs"]]
    whole = program.run(temperature=0)
    meta = whole.get_meta_info("a")
    assert "".join(piece.text for piece in pieces) == state["a"] == whole["a"]
    assert len(pieces) > 3
    assert state.get_meta_info("a")["output_token_logprobs"] == meta["output_token_logprobs"]
    assert entries == meta["output_token_logprobs"][: len(entries)]


def test_the_server_is_described_and_flushed(endpoint: pl.RuntimeEndpoint) -> None:
    assert pl.get_server_info()["context_length"] > 0
    assert endpoint.get_model_name().endswith("embedded")
    usage = endpoint.token_usage
    usage.reset()
    program = pl.function(_say_pd)
    program.run().sync()
    assert (usage.calls, usage.completion_tokens) == (1, 3)
    assert usage.prompt_tokens > 0


def _say_pd(s: Any) -> None:
    s += "pd" + pl.gen("a", 3, ignore_eos=True)
