"""KV events, read by a subscriber that knows MessagePack, ZMQ and vLLM's format, but nothing of pd.

What the format is stands in ``vllm/distributed/kv_events.py`` of vLLM.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import zmq
from cluster import TokenClient, random_prompts, wait_idle, wait_until
from tiny import tiny_node

from pd.core.errors import SetupError, UsageError
from pd.core.kv_events_config import EventsEndpoint, KVEventsConfig, parse_kv_events_config
from pd.net.cluster_key import derive_kv_publisher_keypair, derive_kv_subscriber_keypair
from pd.node.kv_events import publisher as publisher_module
from pd.node.kv_events.publisher import KVEventPublisher
from pd.node.kv_events.wire import EventEncoder
from pd.radix import RadixCache
from pd.radix.block_log import BlockLog
from pd.radix.prefix_hashes import hash_namespace, hash_pages, to_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4
DOCUMENT = Path(__file__).parents[2] / "docs" / "kv-events.md"
ANY_PORT = "tcp://127.0.0.1:*"
ON: dict[str, Any] = {
    "enable_kv_cache_events": True,
    "endpoint": ANY_PORT,
    "replay_endpoint": ANY_PORT,
    "topic": "kv-events",
}


class Subscriber:
    """Keeps the set of stored blocks by events.

    Args:
        lose: whether the next message of the PUB socket is thrown away, as if it never came.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        lose: Callable[[], bool] = lambda: False,
        **options: bytes,
    ) -> None:
        self.context = zmq.Context()
        self.sub, self.dealer = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        for socket, address in ((self.sub, endpoint), (self.dealer, replay_endpoint)):
            for name, value in options.items():
                setattr(socket, name, value)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        self.sub.subscribe(b"kv-events")
        self.lose = lose
        self.next = 0
        self.replayed = 0
        self.blocks: dict[int, int | None] = {}
        self.events: list[list[Any]] = []

    def read(self) -> None:
        """Take what has come, and ask again for what was missed."""
        while self.sub.poll(0):
            topic, number, payload = self.sub.recv_multipart()
            assert topic == b"kv-events" and len(number) == 8
            if self.lose():
                continue
            seen = int.from_bytes(number, "big")
            if seen > self.next:
                self.replay()
            if seen >= self.next:
                self.take(seen, payload)

    def replay(self) -> None:
        """Ask for everything from the next number on."""
        self.dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.dealer.poll(20_000), "no end of the replay"
            delimiter, number, payload = self.dealer.recv_multipart()
            assert not delimiter
            if not payload:
                assert number == b"\xff" * 8
                return
            self.replayed += 1
            self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        ts, events, rank = msgpack.unpackb(payload)
        assert abs(time.time() - ts) < 3600 and rank == 0
        self.next = number + 1
        self.events += events
        for kind, *fields in events:
            if kind == "BlockStored":
                self._store(*fields)
            elif kind == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for name in hashes:
                    self.blocks.pop(name)
            else:
                assert (kind, fields) == ("AllBlocksCleared", [])
                self.blocks.clear()

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
    ) -> None:
        assert block_size == PAGE and medium == "GPU" and lora_id is lora_name is None
        assert parent is None or parent in self.blocks
        assert len(token_ids) in (0, PAGE * len(hashes))
        for name in hashes:
            assert name not in self.blocks
            self.blocks[name], parent = parent, name

    def close(self) -> None:
        self.context.destroy(linger=0)


def all_blocks(radix: RadixCache) -> set[int]:
    return set(to_numbers(radix.join_hashes()))


def hashes_of(tokens: list[int], salt: str = "") -> list[int]:
    data = np.asarray(tokens[: len(tokens) - len(tokens) % PAGE], "<i4").tobytes()
    return list(to_numbers(hash_pages(hash_namespace(salt), data, 4 * PAGE)))


@pytest.mark.parametrize("elastic", ["off", "auto"])
def test_a_lossy_subscriber_ends_with_the_blocks_that_the_node_has(elastic: str, seed: int) -> None:
    """Random conversations of three tenants at a node whose pool is far too small for them, while
    the subscriber loses a third of the messages and joins when some are already published."""
    rng = random.Random(seed)
    config = KVEventsConfig(**ON)
    node = tiny_node("unified", elastic=elastic, kv_cache_tokens=512, kv_events_config=config)
    client = TokenClient([node])
    histories = [list(prompt) for prompt in random_prompts(seed, [40] * 6)]
    info: Any = node.node.server_info()["kv_events"]
    reader: Subscriber | None = None
    try:
        for turn in range(60):
            index = rng.randrange(len(histories))
            salt = ("", "tenant-a", "tenant-b")[index % 3]
            request = client.generate(histories[index], [node], namespace=salt, max_tokens=4)
            history = histories[index] + request.tokens(60)
            histories[index] = [*history, *range(8)] if len(history) < 150 else history[:12]
            if turn == 10:
                reader = Subscriber(
                    info["endpoint"], info["replay_endpoint"], lambda: rng.random() < 0.3
                )
            if reader is not None:
                reader.read()
        wait_idle(node)
        assert reader is not None
        assert node.node.core.memory.radix.evicted_pages > 100, "nothing was evicted"
        end = reader

        def agrees() -> bool:
            end.read()
            end.replay()
            with node.node.core.events.lock:
                return set(end.blocks) == all_blocks(node.node.core.memory.radix)

        wait_until(agrees, 20, lambda: f"seed {seed}: {len(end.blocks)} blocks")
        assert end.replayed
        assert not any(event[3] for event in end.events if event[0] == "BlockStored")
        node.node.flush_cache()
        wait_until(lambda: agrees() and not end.blocks, 20)
    finally:
        client.close()
        node.stop()
        if reader is not None:
            reader.close()


class Source:
    """A cache and its publisher, without a node."""

    def __init__(self, cluster_key: bytes | None = None, **settings: Any) -> None:
        config = KVEventsConfig(**ON | settings)
        self.radix = RadixCache(PAGE)
        self.log = BlockLog(self.radix, max_pages=100_000)
        encoder = EventEncoder(PAGE, token_ids=config.token_ids)
        self.publisher = KVEventPublisher(config, encoder, cluster_key)
        self.publisher.start()

    def insert(self, tokens: list[int], salt: str = "") -> None:
        pages = np.zeros(len(tokens) // PAGE, dtype=np.int32)
        self.radix.insert_prefix(np.asarray(tokens, np.int32), pages, salt)
        self.publish()

    def publish(self) -> None:
        changes = self.log.take_changes()
        assert changes is not None and self.publisher.has_room
        before = self.publisher.num_batches
        self.publisher.publish_soon(changes)
        wait_until(lambda: self.publisher.num_batches > before, 20)

    def subscribe(self, **options: bytes) -> Subscriber:
        assert self.publisher.replay_endpoint is not None
        reader = Subscriber(self.publisher.endpoint, self.publisher.replay_endpoint, **options)
        self.readers.append(reader)
        return reader

    readers: list[Subscriber]


@pytest.fixture
def make_source() -> Iterator[Callable[..., Source]]:
    made: list[Source] = []

    def make(*args: Any, **settings: Any) -> Source:
        made.append(Source(*args, **settings))
        made[-1].readers = []
        return made[-1]

    yield make
    for source in made:
        source.publisher.close()
        for reader in source.readers:
            reader.close()


def test_events_are_the_arrays_that_vllm_writes(make_source: Callable[..., Source]) -> None:
    source = make_source(token_ids=True)
    source.insert([1, 2, 3, 4, 5, 6, 7, 8])
    source.insert([1, 2, 3, 4, 9, 9, 9, 9])
    source.radix.evict_pages(1)
    source.publish()
    reader = source.subscribe()
    reader.replay()
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    (_, third) = hashes_of([1, 2, 3, 4, 9, 9, 9, 9])
    assert reader.events == [
        ["AllBlocksCleared"],
        ["BlockStored", [first, second], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None],
        ["BlockStored", [third], first, [9, 9, 9, 9], 4, None, "GPU", None],
        ["BlockRemoved", [second], "GPU"],
    ]
    assert set(reader.blocks) == all_blocks(source.radix) == {first, third}


def test_tenants_share_no_hash_and_tokens_with_a_salt_are_never_told(
    make_source: Callable[..., Source],
) -> None:
    source = make_source(token_ids=True)
    prompt = [7] * 8
    for salt in ("", "a", "b"):
        source.insert(prompt, salt)
    reader = source.subscribe()
    reader.replay()
    assert len(reader.blocks) == 6
    stored = {tuple(event[1]): event[3] for event in reader.events if event[0] == "BlockStored"}
    assert stored == {
        tuple(hashes_of(prompt)): prompt,
        tuple(hashes_of(prompt, "a")): [],
        tuple(hashes_of(prompt, "b")): [],
    }


def test_long_prompts_come_in_several_batches(make_source: Callable[..., Source]) -> None:
    source = make_source(token_ids=True)
    tokens = list(range(100_000))
    source.insert(tokens)
    wait_until(lambda: source.publisher.num_batches >= 4, 20)
    reader = source.subscribe()
    reader.replay()
    assert list(reader.blocks) == hashes_of(tokens)
    assert [t for event in reader.events[1:] for t in event[3]] == tokens
    source.radix.evict_pages(25_000)
    source.publish()
    wait_until(lambda: source.publisher.num_batches >= 8, 20)
    reader.replay()
    assert not reader.blocks


def test_who_asks_for_more_than_is_kept_gets_everything_soon(
    make_source: Callable[..., Source],
) -> None:
    source = make_source(buffer_steps=3)
    for start in range(10):
        source.insert([start] * PAGE)
    late = source.subscribe()
    wait_until(lambda: late.sub.poll(0) or not _nudge(source), 20)  # subscriptions take a moment
    assert not source.publisher.take_snapshot_wish(100.0)
    late.replay()
    assert late.replayed == 3
    assert source.publisher.take_snapshot_wish(100.0)
    source.log.restart()
    source.publish()
    wait_until(lambda: (late.read(), set(late.blocks) == all_blocks(source.radix))[1], 20)
    late.next = 0
    late.blocks.clear()
    late.replay()
    assert not source.publisher.take_snapshot_wish(101.0), "everybody may ask, but not all the time"
    assert source.publisher.take_snapshot_wish(106.0)


def _nudge(source: Source) -> bool:
    """Publish something small, and wait for subscribers to get it."""
    source.log.restart()
    source.publish()
    time.sleep(0.02)
    return True


def test_what_is_no_request_is_not_answered(make_source: Callable[..., Source]) -> None:
    source = make_source()
    source.insert([1] * PAGE)
    reader = source.subscribe()
    for frames in ([b"x" * 8], [b"", b"1234567"], [b"a", bytes(8)], [b""] * 5, [b"", bytes(9)]):
        reader.dealer.send_multipart(frames)
    reader.replay()
    assert reader.replayed == 1 and not reader.dealer.poll(0)
    stranger = source.subscribe()
    stranger.dealer.send(bytes(1 << 20))  # ends its connection
    reader.next = 0
    reader.replay()
    assert reader.replayed == 2


def test_changes_stay_in_the_log_while_too_many_wait() -> None:
    config = KVEventsConfig(**ON | {"max_queue_size": 2})
    stopped = KVEventPublisher(config, EventEncoder(PAGE, token_ids=False), None)
    log = BlockLog(RadixCache(PAGE), max_pages=10)
    for _ in range(2):
        assert stopped.has_room
        log.restart()
        changes = log.take_changes()
        assert changes is not None
        stopped.publish_soon(changes)
    assert not stopped.has_room
    stopped.close()


def test_beyond_loopback_only_holders_of_the_key_subscribe(
    make_source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventsEndpoint, "is_local", False)  # tests listen on loopback only
    key = b"k" * 32
    source = make_source(key)
    source.insert([1] * PAGE)
    public, secret = derive_kv_subscriber_keypair(key)
    server, _ = derive_kv_publisher_keypair(key)
    options = {"curve_serverkey": server, "curve_publickey": public, "curve_secretkey": secret}
    strangers = [source.subscribe()]
    other_public, other_secret = derive_kv_subscriber_keypair(b"o" * 32)
    others = {"curve_publickey": other_public, "curve_secretkey": other_secret}
    strangers.append(source.subscribe(**options | others))
    member = source.subscribe(**options)
    for reader in (*strangers, member):
        reader.dealer.send_multipart([b"", bytes(8)])
    assert member.dealer.poll(20_000)
    wait_until(lambda: _nudge(source) and member.sub.poll(0), 20)
    assert not any(r.dealer.poll(0) or r.sub.poll(0) for r in strangers)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is a JSON object such as"),
        ("\udc80", "is a JSON object such as"),
        ("[]", "Expected `object`, got `array`"),
        ('{"enable": true}', "unknown field `enable`"),
        ('{"publisher": "nats"}', "Invalid enum value 'nats'"),
        ('{"buffer_steps": 0}', "`int` >= 1"),
        ('{"endpoint": "ipc:///tmp/events"}', "an endpoint is tcp://ADDRESS:PORT.*'ipc:///tmp"),
        ('{"endpoint": "tcp://127.0.0.1"}', "an endpoint is"),
        ('{"replay_endpoint": "tcp://127.0.0.1:70000"}', "not 'tcp://127.0.0.1:70000'"),
    ],
)
def test_bad_settings_are_refused_with_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_kv_events_config(text)


@pytest.mark.parametrize("address", ["*", "0.0.0.0", "10.0.0.5", "[::]", "node-1"])
def test_endpoints_beyond_loopback_need_a_cluster_key(address: str) -> None:
    for name in ("endpoint", "replay_endpoint"):
        config = KVEventsConfig(**ON | {name: f"tcp://{address}:5557"})
        with pytest.raises(UsageError, match="give --cluster-key-file"):
            config.check_exposure(has_key=False)
        config.check_exposure(has_key=True)
        with pytest.raises(UsageError, match="give --cluster-key-file"):
            tiny_node("unified", kv_events_config=config)
    for local in ("127.0.0.1", "localhost", "[::1]"):
        KVEventsConfig(endpoint=f"tcp://{local}:5557").check_exposure(has_key=False)


def test_an_address_in_use_is_named(make_source: Callable[..., Source]) -> None:
    taken = make_source().publisher.endpoint
    with pytest.raises(SetupError, match=f"cannot publish KV events at {taken}"):
        tiny_node("unified", kv_events_config=KVEventsConfig(**ON | {"endpoint": taken}))


def test_what_may_be_asked_again_is_bounded_by_its_size(
    make_source: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_REPLAY_BYTES", 400)
    source = make_source()
    for start in range(50):
        source.insert([start] * PAGE)
    reader = source.subscribe()
    reader.replay()
    assert 0 < reader.replayed < 10


def test_routers_can_compute_the_hashes_as_the_documents_say() -> None:
    (code,) = [
        part for part in DOCUMENT.read_text().split("```python\n")[1:] if "def block_hashes" in part
    ]
    names: dict[str, Any] = {}
    exec(code.split("```")[0], names)
    tokens = list(range(-3, 40))
    for salt in ("", "tenant"):
        assert names["block_hashes"](tokens, PAGE, salt) == hashes_of(tokens, salt)
