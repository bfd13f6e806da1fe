"""``--kv-events-config``: whether and where a node publishes changes of its prefix cache."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec

from pd.core.addresses import format_host, is_loopback
from pd.core.errors import UsageError

_FLAG = "--kv-events-config"
# tcp://127.0.0.1:5557, tcp://[::1]:*, tcp://*:5557
_ENDPOINT = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/@\s]+)):(\d{1,5}|\*)")

_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class EventsEndpoint(NamedTuple):
    """Address and port of a listening socket. Port 0 means any free one."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can reach it."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """The endpoint in ZMQ's format."""
        return f"tcp://{format_host(self.host)}:{self.port or '*'}"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the published events. All names but ``token_ids`` are those of vLLM's flag.

    Attributes:
        publisher: ``null`` publishes nothing, whatever ``enable_kv_cache_events`` says.
        endpoint: address for subscribers.
        replay_endpoint: address at which subscribers ask for missed batches, or None.
        buffer_steps: number of batches kept for replays.
        hwm: limit on batches waiting for a slow subscriber. It misses further ones.
        max_queue_size: limit on batches waiting for the publishing thread. We collect one ten times
            a second, and merge further changes into the last.
        topic: first frame of each message.
        token_ids: events also carry the tokens of prompts, unless a prompt has a ``cache_salt`` or
            an ``extra_key``.
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
        """Whether the node publishes events."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def parse_endpoints(self) -> tuple[EventsEndpoint, EventsEndpoint | None]:
        """Parse the endpoints of events and of replays. Raises UsageError if one is malformed."""
        replay = self.replay_endpoint
        return parse_endpoint(self.endpoint), None if replay is None else parse_endpoint(replay)

    def check_exposure(self, *, has_key: bool) -> None:
        """Raise UsageError if programs on other hosts could connect without a key."""
        for endpoint in self.parse_endpoints():
            if endpoint is not None and not endpoint.is_local and not has_key:
                raise UsageError(
                    f"{_FLAG}: {endpoint.url} can be reached from other hosts; use 127.0.0.1, or "
                    "give --cluster-key-file FILE, so that subscribers have to prove a key"
                )


NO_KV_EVENTS = KVEventsConfig()
_DECODER = msgspec.json.Decoder(KVEventsConfig)


def parse_kv_events_config(text: str) -> KVEventsConfig:
    """Parse the settings from a JSON object. Raises UsageError with the reason."""
    try:
        config = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeError) as error:
        example = "'{\"enable_kv_cache_events\": true}'"
        raise UsageError(f"{_FLAG} is a JSON object such as {example}: {error}") from error
    config.parse_endpoints()
    return config


def parse_endpoint(text: str) -> EventsEndpoint:
    """Parse an endpoint ``tcp://HOST:PORT``. Raises UsageError for anything else."""
    match = _ENDPOINT.fullmatch(text)
    port = 0 if match is None or match[3] == "*" else int(match[3])
    if match is None or port > 65535:
        raise UsageError(
            f"{_FLAG}: an endpoint is tcp://ADDRESS:PORT, with * for every address or any free "
            f"port, not {text!r:.100}"
        )
    host = match[1] or match[2]
    return EventsEndpoint("127.0.0.1" if host.lower() == "localhost" else host, port)
