"""``--kv-events-config``: whether and where a node publishes what its prefix cache holds."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec

from pd.core.addresses import in_url
from pd.core.errors import UsageError
from pd.core.local_requests import is_loopback

_FLAG = "--kv-events-config"
# tcp://127.0.0.1:5557, tcp://[::1]:*, tcp://*:5557
_ENDPOINT = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/@\s]+)):(\d{1,5}|\*)")

_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class EventsEndpoint(NamedTuple):
    """Address on which a socket listens, and its port, or 0 for any free one."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only programs of this host reach it."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """The endpoint as ZMQ wants it."""
        return f"tcp://{in_url(self.host)}:{self.port or '*'}"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the published events; the names are those of vLLM's flag of the same name, and
    ``token_ids``.

    Attributes:
        publisher: ``null`` publishes nothing, whatever ``enable_kv_cache_events`` says.
        endpoint: where subscribers connect.
        replay_endpoint: where they ask for batches that they missed; None for nowhere.
        buffer_steps: batches that can be asked for again.
        hwm: batches that wait for one slow subscriber, beyond which it misses some.
        max_queue_size: how often changes are collected, ten times a second, before the thread that
            publishes them took the first; beyond that they are collected together.
        topic: first frame of each message.
        token_ids: events also carry the tokens of prompts without a ``cache_salt`` and an
            ``extra_key``.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 1000
    max_queue_size: _Count = 1000
    topic: str = ""
    token_ids: bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def endpoints(self) -> tuple[EventsEndpoint, EventsEndpoint | None]:
        """Endpoints of events and of replays. Raises UsageError for a text that is no endpoint."""
        replay = self.replay_endpoint
        return parse_endpoint(self.endpoint), None if replay is None else parse_endpoint(replay)

    def check_exposure(self, *, has_key: bool) -> None:
        """Raise UsageError if others than this host's programs could connect without a key."""
        for endpoint in self.endpoints():
            if endpoint is not None and not endpoint.is_local and not has_key:
                raise UsageError(
                    f"{_FLAG}: {endpoint.url} can be reached from other hosts; give "
                    "--cluster-key-file FILE, with which subscribers have to prove a key, or use "
                    "127.0.0.1"
                )


NO_KV_EVENTS = KVEventsConfig()
_DECODER = msgspec.json.Decoder(KVEventsConfig)


def parse_kv_events_config(text: str) -> KVEventsConfig:
    """The settings in a JSON object. Raises UsageError that names what is wrong."""
    try:
        config = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        example = "'{\"enable_kv_cache_events\": true}'"
        raise UsageError(f"{_FLAG} is a JSON object such as {example}: {error}") from error
    config.endpoints()
    return config


def parse_endpoint(text: str) -> EventsEndpoint:
    """An endpoint ``tcp://HOST:PORT``. Raises UsageError for anything else."""
    found = _ENDPOINT.fullmatch(text)
    port = 0 if found is None or found[3] == "*" else int(found[3])
    if found is None or port > 65535:
        raise UsageError(
            f"{_FLAG}: an endpoint is tcp://ADDRESS:PORT, with * for every address or any free "
            f"port, not {text!r:.100}"
        )
    host = found[1] or found[2]
    return EventsEndpoint("127.0.0.1" if host.lower() == "localhost" else host, port)
