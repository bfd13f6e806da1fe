"""Guesses of API keys: slow from each address, and no harm to those who have a key."""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import edge_helpers  # noqa: F401  # finds the proxy's helpers
import httpx
import pytest
from proxy_cluster import Cluster

from pd.core.errors import QueueFullError
from pd.proxy.http import key_guesses
from pd.proxy.http.api_keys import ApiKey
from pd.proxy.http.key_guesses import KeyGuesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd.proxy.server import ProxyThread

RIGHT, OTHER = "right-key", "other-key"
KEYS = [ApiKey(RIGHT, "inference"), ApiKey(OTHER, "admin")]


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyThread]:
    with ExitStack() as stack:
        cluster = Cluster(stack, str(tmp_path))
        cluster.node("unified")
        yield cluster.proxy(text=False, api_keys=KEYS)


def ask(proxy: ProxyThread, key: str, path: str = "/v1/models", **headers: str) -> int:
    headers["Authorization"] = f"Bearer {key}"
    return httpx.get(proxy.url + path, headers=headers, timeout=30).status_code


@pytest.mark.one_process("each process counts for itself")
def test_guesses_from_one_address_are_slow_and_right_keys_are_not(proxy: ProxyThread) -> None:
    assert ask(proxy, RIGHT) == 200
    began = time.monotonic()
    with ThreadPoolExecutor(60) as pool:
        guesses = [pool.submit(ask, proxy, f"guess-{number}") for number in range(300)]
        # While they come, and at once: the key was right from here before.
        for _ in range(20):
            assert ask(proxy, RIGHT) == 200
        statuses = [guess.result() for guess in guesses]
    seconds = time.monotonic() - began
    assert set(statuses) == {401, 429}
    compared = statuses.count(401)
    assert compared <= key_guesses.BURST + key_guesses.PER_SECOND * seconds + 1
    assert ask(proxy, OTHER) == 200, "the first time from here, it waits and is right"


@pytest.mark.one_process("each process counts for itself")
def test_a_header_is_no_address(proxy: ProxyThread) -> None:
    """Whoever sends another one each time is the same client all the same."""
    with ThreadPoolExecutor(60) as pool:
        guesses = [
            pool.submit(ask, proxy, f"guess-{n}", **{"X-Forwarded-For": f"10.0.{n}.1"})
            for n in range(200)
        ]
        assert 429 in [guess.result() for guess in guesses]


def test_open_paths_tell_nothing_of_a_key_and_cost_no_turn(proxy: ProxyThread) -> None:
    for number in range(3 * key_guesses.BURST):
        assert ask(proxy, f"guess-{number}", "/health") == 200
    assert ask(proxy, RIGHT) == 200


def test_a_key_of_any_length_or_kind_is_refused(proxy: ProxyThread) -> None:
    for key in ("a" * 10_000, RIGHT + "x", RIGHT[:-1], "\xe9"):
        header = b"Bearer " + key.encode("latin-1")
        answer = httpx.get(f"{proxy.url}/v1/models", headers={b"Authorization": header})
        assert answer.status_code == 401


def test_guesses_that_wait_when_the_proxy_stops_are_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(key_guesses.MAX_WAITING) as pool, ExitStack() as stack:
        cluster = Cluster(stack, str(tmp_path))
        cluster.node("unified")
        proxy = cluster.proxy(text=False, api_keys=KEYS)
        for number in range(key_guesses.BURST):
            assert ask(proxy, f"guess-{number}") == 401
        guesses = [pool.submit(ask, proxy, f"late-{n}") for n in range(key_guesses.MAX_WAITING)]
        assert guesses[0].result() == 401, "the others wait for their turns"
        stack.close()
        assert {401, 503} == {guess.result() for guess in guesses}
    assert [record for record in caplog.records if record.exc_info] == []


def digest(key: object) -> bytes:
    return hashlib.sha256(str(key).encode()).digest()


def run(main: Any) -> None:
    asyncio.run(main())


def test_turns_of_one_address_are_its_own() -> None:
    async def main() -> None:
        guesses = KeyGuesses()
        for number in range(key_guesses.BURST):
            await guesses.wait_turn("10.0.0.1", digest(number))
        waiting = [
            asyncio.create_task(guesses.wait_turn("10.0.0.1", digest(f"late {number}")))
            for number in range(key_guesses.MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await guesses.wait_turn("10.0.0.1", digest("one more"))
        began = asyncio.get_running_loop().time()
        await guesses.wait_turn("10.0.0.2", digest(0))
        assert asyncio.get_running_loop().time() - began < 1 / key_guesses.PER_SECOND
        assert not all(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert guesses._waiting == 0

    run(main)


def test_right_keys_take_no_turns_and_wait_no_more() -> None:
    async def main() -> None:
        guesses = KeyGuesses()
        for number in range(3 * key_guesses.BURST):
            await guesses.wait_turn("10.0.0.1", digest(number % 30))
            guesses.mark_right("10.0.0.1", digest(number % 30))
        source = guesses._find_source("10.0.0.1")
        assert source.seconds_to_turn() == 0
        source.turns = -1e9
        await asyncio.wait_for(guesses.wait_turn("10.0.0.1", digest(29)), 1)

    run(main)


def test_an_address_of_ipv6_is_its_network() -> None:
    guesses = KeyGuesses()
    assert guesses._find_source("2001:db8::1") is guesses._find_source("2001:db8::2:3")
    assert guesses._find_source("2001:db8::1") is not guesses._find_source("2001:db8:0:1::1")
    assert guesses._find_source("::ffff:10.0.0.1") is guesses._find_source("10.0.0.1")
    assert guesses._find_source("fe80::1%eth0") is guesses._find_source("fe80::2%eth0")
    assert guesses._find_source("not an address:") is not guesses._find_source("")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_guesses, "MAX_SOURCES", 10)
    guesses = KeyGuesses()
    for number in range(100):
        guesses.mark_right("10.0.0.255", digest(number))
        guesses._find_source(f"10.0.0.{number}")
    assert len(guesses._sources) == 10
    assert len(guesses._find_source("10.0.0.255").proven) == key_guesses.MAX_PROVEN
