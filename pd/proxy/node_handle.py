"""One node, as the proxy knows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from pd.core.messages import (
    PREFIXES_UNKNOWN,
    PREFIXES_UNWANTED,
    PreferRole,
    ProxyHeartbeat,
)
from pd.core.node_info import NO_HEAD, SAMPLING_DEFAULTS, Role
from pd.core.sampling_params import SamplingDefaults
from pd.core.starvation import RUN_DELAY
from pd.proxy.breaker import Breaker
from pd.proxy.load_estimate import LoadEstimate
from pd.proxy.reported_prefixes import ReportedPrefixes

if TYPE_CHECKING:
    from pd.core.messages import Message, NodeHeartbeat, PrefixEvents, RoleState
    from pd.proxy.attempt import Attempt
    from pd.proxy.channel import NodeChannel
    from pd.proxy.policies import Prompt
    from pd.proxy.prefix_tree import PrefixTree
    from pd.proxy.responses import WorkerEntry


_JUST_NOW_SECONDS = 0.02


# Bounds of what a node that is not authenticated yet may report of itself.
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Name = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*$")]
_InstanceId = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]
# Only TCP: the other transports of ZMQ reach sockets of this host and this process.
_MessageEndpoint = Annotated[str, msgspec.Meta(max_length=300, pattern=r"^tcp://[^\s/@]+:\d+$")]
_HttpEndpoint = Annotated[str, msgspec.Meta(max_length=300, pattern=r"^(https?://[^\s/@]+/?)?$")]


class Endpoints(msgspec.Struct):
    zmq: _MessageEndpoint
    bootstrap: _HttpEndpoint | None = None


class Pages(msgspec.Struct):
    total: _Count


class ServerInfo(msgspec.Struct):
    """The part of ``/server_info`` that matters here; everything else is ignored."""

    role: Role
    instance_id: _InstanceId
    model: _Name
    page_size: _Count
    context_length: _Count
    endpoints: Endpoints
    pages: Pages
    vocab_size: _Count | None = None
    model_path: _Name | None = None
    model_id: _Name = ""
    dtype: _Name = ""
    elastic: bool = False
    kv_digest: bool = False
    drafter: _Name = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    transfer_backend: _Name = ""
    transfer_backends: Annotated[list[_Name], msgspec.Meta(max_length=64)] = []

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV the node can hold."""
        return self.pages.total * self.page_size

    @property
    def recommended(self) -> str:
        """The sampling defaults in words."""
        return str(self.sampling_defaults)

    @property
    def head(self) -> str:
        """What the node's drafter needs of its peer, in words."""
        return self.drafter or NO_HEAD

    def difference(self, other: ServerInfo) -> str | None:
        """Return why a handshake of two nodes cannot succeed, as far as the proxy can tell."""
        for name, field in (
            ("model", "model"),
            ("dtype", "dtype"),
            ("weights or a shape of the model with the fingerprint", "model_id"),
            ("--kv-digest", "kv_digest"),
            ("--speculative-algorithm", "head"),
            (SAMPLING_DEFAULTS, "recommended"),
        ):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return f"{self.role} has {name} {ours!r}, {other.role} has {theirs!r}"
        offered = [info.transfer_backends or [info.transfer_backend] for info in (self, other)]
        if set(offered[0]).isdisjoint(offered[1]):
            first, second = (" or ".join(backends) for backends in offered)
            return f"{self.role} has transfer backend {first}, {other.role} has {second}"
        return None


class NodeHandle:
    """One node at one URL, through restarts.

    Args:
        itl: seconds between tokens that the node is asked to keep; 0 leaves it to the node.

    Attributes:
        added_as: the role with which it was added; the node must have it unless it is elastic.
        role: what the node does; of an elastic node, what it does where nothing speaks against it.
        role_is_fixed: an administrator set it.
        roles: the role that an elastic node prefers, and the proxy that may move it, by its last
            heartbeat.
        wants_lease: this proxy asks for the lease with which it may move the role.
        claimed: what answers at the URL says this about itself. Anybody can say anything, so it is
            good for opening a channel and no more.
        info: the same once heartbeats of that instance came over the channel, which with a cluster
            key only its holders can send; afterwards that of the last instance for which this held.
            Models, limits and routes are taken from here.
        channel: message socket to the claimed instance.
        alive: its heartbeats come.
        connected: what was sent to it last was taken; false as soon as its process is gone.
        accepting: it takes new requests, by its own word.
        draining: removed by the operator; it only finishes what it has.
        losses: how often it gave up requests of this proxy; None before it said so.
        run_delay: seconds that it was ready to run and got no CPU, see :mod:`pd.core.starvation`.
        active: attempts that need this node.
        others: requests of other proxies, or other processes of this one, that it has at least, by
            its last two heartbeats: one may count requests that have just ended here.
        pending_tokens: prompt tokens sent here whose first output token has not come back.
        leaving, stuck: as it says, see :class:`pd.core.messages.NodeHeartbeat`.
        breaker: takes it out while it fails its requests.
        hand_offs: breakers of its pairs with nodes to which it sends KV, where one of the two is
            elastic and so can serve without the other.
        linked: prefill nodes to which this decode node has made its links; None if it does not say.
        tree: prefixes that it presumably holds, kept by the cache-aware policy; of an elastic node
            those that it reports.
        load: what requests would meet at an elastic node.
        problem: why it cannot be used, for people.
    """

    def __init__(self, role: Role, url: str, itl: float = 0.0) -> None:
        self.added_as = self.role = role
        self.role_is_fixed = False
        # An administrator left the role to proxies, which the node may not know.
        self._frees_role = False
        self.roles: RoleState | None = None
        self.wants_lease = False
        # Orders of administrators of which the node had told when its role was taken last.
        self._administered = 0
        # The heartbeats that the node answered last, and before which it got an order for a role.
        self._answered = self._ordered = 0
        self.url = url
        self._itl = itl
        self.claimed: ServerInfo | None = None
        self.info: ServerInfo | None = None
        self.channel: NodeChannel | None = None
        self.alive = False
        self.connected = True
        self.accepting = False
        self.draining = False
        self.last_heard = time.monotonic()
        self._sent_at = 0.0
        self.queued_tokens = 0
        self.running = 0
        self.losses: int | None = None
        self.run_delay = 0.0
        self.active: dict[Attempt, None] = {}
        self.others = self._others_lately = 0
        self.pending_tokens = 0
        self.leaving = self.stuck = False
        self.breaker = Breaker()
        self.hand_offs: dict[NodeHandle, Breaker] = {}
        self.linked: list[str] | None = None
        self.tree: PrefixTree | ReportedPrefixes | None = None
        self.load = LoadEstimate()
        self.problem = "not reached yet"

    @property
    def instance_id(self) -> str:
        return self.claimed.instance_id if self.claimed else ""

    @property
    def ready(self) -> bool:
        """Whether new requests may go there."""
        return self.could_serve and self.breaker.lets_in

    @property
    def could_serve(self) -> bool:
        """Whether new requests might go there, but for the breaker."""
        return self.alive and self.connected and self.accepting and not self.draining

    @property
    def _prefixes_known(self) -> int:
        """Number of the last report of prefixes, or what asks for none or for all."""
        if isinstance(self.tree, ReportedPrefixes):
            return self.tree.number
        return PREFIXES_UNKNOWN if self.elastic else PREFIXES_UNWANTED

    def take_prefixes(self, events: PrefixEvents) -> None:
        """Take a report of what is cached at an elastic node."""
        if self.info is None or not self.elastic:
            return
        if not isinstance(self.tree, ReportedPrefixes):
            self.tree = ReportedPrefixes(self.info.page_size, self.info.pages.total)
        self.tree.apply(events)

    def cached_tokens(self, prompt: Prompt) -> int:
        """Leading tokens of a prompt that the node presumably holds, in whole pages."""
        if self.tree is None:
            return 0
        return self.tree.match(prompt.token_ids, prompt.namespace, prompt.data)

    @property
    def elastic(self) -> bool:
        """Whether the node does what every role does."""
        return self.info is not None and self.info.elastic

    @property
    def computes_prompts(self) -> bool:
        """Whether prompts may be computed there."""
        return self.role != "decode" or self.elastic

    @property
    def sends(self) -> bool:
        """Whether it may compute prompts whose answers other nodes generate."""
        return self.role == "prefill" or self.elastic

    @property
    def receives(self) -> bool:
        """Whether it may generate the answers to prompts that other nodes compute."""
        return self.role == "decode" or self.elastic

    @property
    def serves_alone(self) -> bool:
        """Whether it can serve a request from the prompt to the last token."""
        return self.role == "unified" or self.elastic

    def hand_off_to(self, other: NodeHandle) -> Breaker | None:
        """The breaker of the pair with another node; None if failures count for the nodes."""
        if not self.elastic and not other.elastic:
            return None
        return self.hand_offs.setdefault(other, Breaker())

    def hands_off_to(self, other: NodeHandle) -> bool:
        """Whether KV may be sent to another node, as far as the last times tell."""
        return other not in self.hand_offs or self.hand_offs[other].lets_in

    def partner_lost(self, partner: NodeHandle) -> None:
        """Another node has ended, or was restarted."""
        self.breaker.partner_lost(partner)
        self.hand_offs.pop(partner, None)

    def can_take(self, prompt_tokens: int, new_tokens: int = 1) -> bool:
        """Whether a new request may go there of which it has to hold the prompt and, if it is to
        generate the answer, as many new tokens. A node refuses one that it could never hold."""
        # The last token is generated, but its KV is never needed.
        held = prompt_tokens + new_tokens - 1
        return (
            self.ready
            and self.info is not None
            and held < self.info.context_length
            and held <= self.info.pool_tokens
        )

    @property
    def prefill_load(self) -> int:
        """Prompt tokens waiting there. The node counts those of other proxies too, but late."""
        return max(self.queued_tokens, self.pending_tokens)

    @property
    def decode_load(self) -> int:
        """Requests there."""
        return max(self.running, len(self.active))

    def heard(self, heartbeat: NodeHeartbeat) -> None:
        self.last_heard = time.monotonic()
        self.alive, self.info = True, self.claimed
        self.accepting = heartbeat.ready
        self.queued_tokens = heartbeat.queued_tokens
        self.running = heartbeat.running
        surplus = max(0, heartbeat.running - len(self.active))
        self.others, self._others_lately = min(surplus, self._others_lately), surplus
        self.losses = heartbeat.losses
        self.run_delay = heartbeat.run_delay
        self.linked = heartbeat.linked
        self.leaving = heartbeat.leaving
        self.stuck = heartbeat.stuck
        self.load.heard(heartbeat.load, heartbeat.answers)
        self.roles = heartbeat.roles
        self._answered = heartbeat.answers
        if self.roles is None and not self.elastic:
            self.role, self.role_is_fixed = self.added_as, False
        elif self.roles is not None and self._answered > self._ordered:
            self._take_role(self.roles)
        self.problem = "" if heartbeat.ready else "the node is not ready or drains"

    def meets(self, info: ServerInfo) -> None:
        """A process answers at the URL that is not known yet, or was lost."""
        if info.instance_id != self.instance_id:
            self._administered = 0
        self.claimed, self.tree = info, None

    def fix_role(self, role: Role) -> None:
        """An administrator sets the role of an elastic node."""
        self.role, self.role_is_fixed, self._frees_role = role, True, False

    def free_role(self) -> None:
        """An administrator leaves the role of an elastic node to proxies."""
        self.role_is_fixed, self._frees_role = False, True

    def _take_role(self, state: RoleState) -> None:
        """Take the role that an elastic node prefers: if it got no order since its start, the one
        with which it was started. An administrator's is given up only for an administrator's, or
        if the node got an order to leave the role to proxies since."""
        assert self.info is not None
        is_later = state.administered > self._administered
        self._frees_role &= state.fixed and not is_later
        if self._frees_role:
            return  # it does not know yet that its role is fixed no more
        if state.fixed or is_later or not self.role_is_fixed:
            self.role, self.role_is_fixed = state.role or self.info.role, state.fixed
        self._administered = state.administered

    @property
    def lacks_order(self) -> bool:
        """Whether an elastic node does not know an administrator's last order: it was started again
        or out of reach, or the order was lost."""
        if self.roles is None or self._answered <= self._ordered:
            return False
        return self._frees_role if self.roles.fixed else self.role_is_fixed

    def order_role(self, sender: str, role: Role | None, *, fixed: bool) -> None:
        """Have an elastic node prefer a role; its next heartbeats say whether it does.

        Args:
            sender: this proxy.
            role: None leaves it to the proxy that has the lease.
            fixed: an administrator wants it, which needs no lease.
        """
        assert self.roles is not None
        term = self.roles.term
        self._ordered = self.load.last_beat
        self.send(PreferRole(to=self.instance_id, sender=sender, role=role, fixed=fixed, term=term))

    def lost(self, problem: str) -> None:
        self.alive = self.accepting = self.leaving = self.stuck = False
        self.breaker = Breaker()
        self.hand_offs.clear()
        self.load, self.roles = LoadEstimate(), None
        self._answered = self._ordered = 0
        self.queued_tokens = self.running = self.pending_tokens = 0
        self.problem = problem

    def send(self, message: Message) -> bool:
        """Whether the message was taken, by a connection that stood."""
        self.connected = self.channel is not None and self.channel.send(message)
        self._sent_at = time.monotonic()
        return self.connected

    def beat(
        self,
        sender: str,
        run_delays: dict[str, float] | None = None,
        meet: dict[str, str] | None = None,
    ) -> bool:
        """Send a heartbeat of the proxy ``sender``; whether the connection stands."""
        heartbeat = ProxyHeartbeat(
            to=self.instance_id,
            sender=sender,
            run_delay=RUN_DELAY.total,
            run_delays=run_delays or {},
            meet=meet or {},
            number=self.load.beat(),
            itl=self._itl,
            prefixes=self._prefixes_known,
            decides=self.wants_lease,
        )
        return self.send(heartbeat)

    def can_be_reached(self, sender: str) -> bool:
        """Whether the connection stands, by a heartbeat unless something was sent just now."""
        is_known = time.monotonic() - self._sent_at < _JUST_NOW_SECONDS
        return self.connected if is_known else self.beat(sender)

    def describe(self) -> WorkerEntry:
        """One entry of ``GET /workers``."""
        return {
            "role": self.role,
            "url": self.url,
            "instance_id": self.instance_id or None,
            "model": self.info.model if self.info else None,
            "ready": self.ready,
            "draining": self.draining,
            "running": self.decode_load,
            "queued_tokens": self.prefill_load,
            "problem": self.problem
            or self.breaker.problem
            or (None if self.connected else "it cannot be reached"),
        }
