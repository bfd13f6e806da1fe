"""A prompt may have some hundred kilobytes, and the event loop stands still while it is copied."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from pd.proxy.dispatch.dispatcher import Dispatcher

if TYPE_CHECKING:
    from proxy_cluster import Cluster

pytestmark = pytest.mark.one_process("they look into the process")
PROMPT = list(range(100, 200))


class Counted(np.ndarray[Any, Any]):
    """Token ids of a prompt, with the names of the functions that copied them."""

    copies: ClassVar[list[str]] = []

    def tobytes(self, *args: Any) -> bytes:
        self.copies.append("tobytes")
        return super().tobytes(*args)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self.copies.append(function.__name__)
        return super().__array_function__(function, types, args, kwargs)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that copied a prompt of a client, in their order."""
    start = Dispatcher._start_prompt
    monkeypatch.setattr(Counted, "copies", [])

    def counting(self: Any, spec: Any, job: Any, *route: Any) -> None:
        if len(spec.token_ids) > 1:  # no probe
            spec = replace(spec, token_ids=spec.token_ids.view(Counted))
        start(self, spec, job, *route)

    monkeypatch.setattr(Dispatcher, "_start_prompt", counting)
    return Counted.copies


def ask(cluster: Cluster, policy: str) -> None:
    prefill, decode = cluster.pair()
    client = cluster.client(policy=policy)
    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "n": 2}}
    answers = client.post("/generate", json=asked).json()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [8, 8]
    for node in (prefill, decode):
        assert np.frombuffer(node.generates[0].token_ids, np.int32).tolist() == PROMPT


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two"])
def test_policies_that_ignore_prompts_copy_none(
    cluster: Cluster, copies: list[str], policy: str
) -> None:
    ask(cluster, policy)
    assert not copies


def test_a_policy_that_looks_for_prefixes_copies_a_prompt_once(
    cluster: Cluster, copies: list[str]
) -> None:
    """It puts the prompt together with each answer, too, which is not counted here."""
    ask(cluster, "cache_aware")
    assert copies == ["tobytes"]
