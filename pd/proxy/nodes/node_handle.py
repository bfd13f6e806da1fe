"""One node as the proxy knows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from pd.core.brief import short_repr
from pd.core.messages import (
    PREFIXES_UNKNOWN,
    PREFIXES_UNWANTED,
    PreferRole,
    ProxyHeartbeat,
)
from pd.core.node_info import (
    MAX_NAMED,
    NO_HEAD,
    SAMPLING_DEFAULTS,
    Identity,
    Role,
    identity_differences,
)
from pd.core.sampling_params import SamplingDefaults
from pd.proxy.nodes.breaker import Breaker
from pd.proxy.nodes.load_estimate import LoadEstimate
from pd.proxy.nodes.reported_prefixes import ReportedPrefixes
from pd.util.starvation import RUN_DELAY

if TYPE_CHECKING:
    from pd.core.messages import Message, NodeHeartbeat, PrefixEvents, RoleState
    from pd.proxy.api.answer_schemas import WorkerEntry
    from pd.proxy.nodes.channel import NodeChannel
    from pd.proxy.nodes.prefix_tree import PrefixTree
    from pd.proxy.routing.demand import Prompt


_JUST_NOW_SECONDS = 0.02
NO_HEARTBEAT_YET = "no heartbeat yet"


# Limits on descriptions of unauthenticated nodes.
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
# NOTE: msgspec searches with Python's `re`, whose `$` also matches before a final line break.
_Name = Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
_InstanceId = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w.:-]+\Z")]
# Only TCP, because other transports of ZMQ reach sockets of this host and this process.
_MessageEndpoint = Annotated[str, msgspec.Meta(max_length=300, pattern=r"^tcp://[^\s/@]+:[0-9]+\Z")]
_HttpEndpoint = Annotated[str, msgspec.Meta(max_length=300, pattern=r"^(https?://[^\s/@]+/?)?\Z")]


class Endpoints(msgspec.Struct):
    zmq: _MessageEndpoint
    bootstrap: _HttpEndpoint | None = None


class Pages(msgspec.Struct):
    total: _Count


class ServerInfo(msgspec.Struct):
    """The fields of ``/server_info`` needed by the proxy. We ignore all others."""

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
    identity: Identity = {}
    drafter: _Name = ""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    transfer_backend: _Name = ""
    transfer_backends: Annotated[list[_Name], msgspec.Meta(max_length=64)] = []

    @property
    def pool_tokens(self) -> int:
        """Number of tokens whose KV fits into the node."""
        return self.pages.total * self.page_size

    def find_difference(self, other: ServerInfo) -> str | None:
        """Return why a handshake of two nodes would fail, as far as the proxy can tell: the
        different setting, with both values."""
        pairs: list[tuple[str, object, object]] = [
            *self._answer_differences(other),
            ("--kv-digest", self.kv_digest, other.kv_digest),
            ("--speculative-algorithm", self.drafter or NO_HEAD, other.drafter or NO_HEAD),
            (SAMPLING_DEFAULTS, str(self.sampling_defaults), str(other.sampling_defaults)),
        ]
        differences = [pair for pair in pairs if pair[1] != pair[2]]
        if differences:
            return self._describe_differences(other, differences)
        offered = [info.transfer_backends or [info.transfer_backend] for info in (self, other)]
        if set(offered[0]).isdisjoint(offered[1]):
            first, second = (" or ".join(backends) for backends in offered)
            return f"{self.role} has transfer backend {first}, {other.role} has {second}"
        return None

    def find_answer_difference(self, other: ServerInfo) -> str | None:
        """Return why one node cannot continue an answer of the other: the different setting, with
        both values."""
        differences = [pair for pair in self._answer_differences(other) if pair[1] != pair[2]]
        return self._describe_differences(other, differences) if differences else None

    def _answer_differences(self, other: ServerInfo) -> list[tuple[str, object, object]]:
        """Return settings that determine answers, with both values. Some may be equal."""
        named: list[tuple[str, object, object]]
        named = [("model", self.model, other.model), ("dtype", self.dtype, other.dtype)]
        named += identity_differences(self.identity, other.identity)
        if len(named) == len(("model", "dtype")):  # else the digest says no more than these
            name = "weights or a shape of the model with the fingerprint"
            named.append((name, self.model_id, other.model_id))
        return named

    def _describe_differences(
        self, other: ServerInfo, differences: list[tuple[str, object, object]]
    ) -> str:
        texts = [
            f"{self.role} has {name} {short_repr(ours)}, {other.role} has {short_repr(theirs)}"
            for name, ours, theirs in differences[:MAX_NAMED]
        ]
        more = len(differences) - len(texts)
        return "; ".join(texts) + (f"; and {more} more settings differ" if more else "")


class NodeHandle:
    """One node at one URL, through restarts.

    Args:
        itl: seconds between tokens we ask the node to keep; 0 leaves it to the node.

    Attributes:
        added_as: role with which the node was added. It must have this role unless it is elastic.
        proved_role: a different current role of the node at the URL, or None.
        role: role of the node; for an elastic node its preferred role.
        role_is_fixed: an administrator set the role.
        roles: an elastic node's preferred role and the proxy allowed to move it, from its last
            heartbeat.
        wants_lease: this proxy asks for the lease to move the role.
        claimed: the description served at the URL. Anybody can claim anything, so we only use it to
            open a channel.
        info: the same once heartbeats of that instance arrived over the channel. With a cluster
            key, only its holders can send them. Later it stays that of the last proven instance.
            Models, limits and routes come from here.
        channel: message socket to the claimed instance.
        is_alive: heartbeats of the node arrive.
        is_connected: the last message was accepted for sending; False as soon as the process is
            gone.
        is_accepting: the node reports that it takes new requests.
        is_draining: the operator removed the node. It only finishes its requests.
        losses: how often it gave up requests of this proxy; None before its first report.
        run_delay: seconds for which it was ready to run but had no CPU, see
            :mod:`pd.util.starvation`.
        active: attempts that need this node (see :func:`pd.proxy.dispatch.attempts.list_active`).
        num_others: minimum number of requests of other processes or proxies in the last two
            heartbeats, because a single one may include requests that just ended here.
        pending_tokens: tokens of prompts sent to the node without an output token yet.
        is_leaving, is_stuck: see :class:`pd.core.messages.NodeHeartbeat`.
        breaker: disables the node while it fails its requests.
        hand_offs: breakers of pairs with nodes receiving KV from this one. Only pairs with an
            elastic node have one, because only elastic nodes can serve without the other.
        linked_nodes: prefill nodes linked to this decode node; None if it does not report them.
        tree: presumable prefixes in the node's cache, kept by the cache-aware policy; for an
            elastic node the prefixes it reports.
        load: estimated load of an elastic node.
        problem: why we cannot use the node, for people.
    """

    def __init__(self, role: Role, url: str, itl: float = 0.0) -> None:
        self.added_as = self.role = role
        self.proved_role: Role | None = None
        self.role_is_fixed = False
        # An administrator left the role to proxies, and the node may not know yet.
        self._frees_role = False
        self.roles: RoleState | None = None
        self.wants_lease = False
        # Number of administrators' orders the node had reported when we took its role.
        self._administered = 0
        # Numbers of the last answered heartbeat, and of the last one before an order.
        self._answered = self._ordered = 0
        self.url = url
        self._itl = itl
        self.claimed: ServerInfo | None = None
        self.info: ServerInfo | None = None
        self.channel: NodeChannel | None = None
        self.is_alive = False
        self.is_connected = True
        self.is_accepting = False
        self.is_draining = False
        self.last_heard = time.monotonic()
        self._sent_at = 0.0
        self.queued_tokens = 0
        self.running = 0
        self.losses: int | None = None
        self.run_delay = 0.0
        self.active: dict[object, None] = {}
        self.num_others = self._num_others_lately = 0
        self.pending_tokens = 0
        self.is_leaving = self.is_stuck = False
        self.breaker = Breaker()
        self.hand_offs: dict[NodeHandle, Breaker] = {}
        # Results of comparisons with other nodes, with both descriptions at that time.
        self._compared: dict[NodeHandle, tuple[ServerInfo, ServerInfo, bool]] = {}
        self.linked_nodes: list[str] | None = None
        self.tree: PrefixTree | ReportedPrefixes | None = None
        self.load = LoadEstimate()
        self.problem = "not reached yet"

    @property
    def instance_id(self) -> str:
        return self.claimed.instance_id if self.claimed else ""

    @property
    def is_ready(self) -> bool:
        """Whether new requests may go to the node."""
        return self.could_serve and self.breaker.allows_requests

    @property
    def could_serve(self) -> bool:
        """Whether new requests might go to the node, apart from its breaker."""
        return self.is_alive and self.is_connected and self.is_accepting and not self.is_draining

    @property
    def _prefixes_known(self) -> int:
        """Number of the last report of prefixes, or a constant requesting none or all."""
        if isinstance(self.tree, ReportedPrefixes):
            return self.tree.number
        return PREFIXES_UNKNOWN if self.is_elastic else PREFIXES_UNWANTED

    def take_prefixes(self, events: PrefixEvents) -> None:
        """Apply an elastic node's report of its cache."""
        if self.info is None or not self.is_elastic:
            return
        if not isinstance(self.tree, ReportedPrefixes):
            self.tree = ReportedPrefixes(self.info.page_size, self.info.pages.total)
        self.tree.apply_events(events)

    def cached_tokens(self, prompt: Prompt) -> int:
        """Count the leading tokens of a prompt presumably cached by the node, in whole pages."""
        if self.tree is None:
            return 0
        return self.tree.count_cached(prompt.token_ids, prompt.namespace, prompt.data)

    @property
    def is_elastic(self) -> bool:
        """Whether the node can serve in every role."""
        return self.info is not None and self.info.elastic

    @property
    def computes_prompts(self) -> bool:
        """Whether the node may prefill."""
        return self.role != "decode" or self.is_elastic

    @property
    def can_send(self) -> bool:
        """Whether the node may prefill for answers of other nodes."""
        return self.role == "prefill" or self.is_elastic

    @property
    def can_receive(self) -> bool:
        """Whether the node may generate answers to prompts of other nodes."""
        return self.role == "decode" or self.is_elastic

    @property
    def serves_alone(self) -> bool:
        """Whether the node can serve a whole request."""
        return self.role == "unified" or self.is_elastic

    def get_hand_off(self, other: NodeHandle) -> Breaker | None:
        """Return the breaker of the pair; None if failures count for each node."""
        if not self.is_elastic and not other.is_elastic:
            return None
        return self.hand_offs.setdefault(other, Breaker())

    def can_hand_off_to(self, other: NodeHandle) -> bool:
        """Whether KV may be sent to another node, judged by earlier hand-offs."""
        return other not in self.hand_offs or self.hand_offs[other].allows_requests

    def fits_with(self, other: NodeHandle) -> bool:
        """Whether another node can use KV of this one."""
        if self.info is None or other.info is None:
            return False
        known = self._compared.get(other)
        if known is None or known[0] is not self.info or known[1] is not other.info:
            known = self.info, other.info, self.info.find_difference(other.info) is None
            self._compared[other] = known
        return known[2]

    def forget_partner(self, partner: NodeHandle) -> None:
        """Forget a node that ended or restarted."""
        self._compared.pop(partner, None)
        self.breaker.forget_partner(partner)
        self.hand_offs.pop(partner, None)

    def can_take(self, prompt_tokens: int, new_tokens: int = 1) -> bool:
        """Whether a new request may go to the node.

        It must hold the prompt and, if it generates the answer, the new tokens. Nodes reject
        requests they could never hold.
        """
        # We never need the KV of the last token.
        held = prompt_tokens + new_tokens - 1
        return (
            self.is_ready
            and self.info is not None
            and held < self.info.context_length
            and held <= self.info.pool_tokens
        )

    @property
    def prefill_load(self) -> int:
        """Number of waiting prompt tokens. The node also counts those of other proxies, but
        late."""
        return max(self.queued_tokens, self.pending_tokens)

    @property
    def decode_load(self) -> int:
        """Number of requests at the node."""
        return max(self.running, len(self.active))

    def take_heartbeat(self, heartbeat: NodeHeartbeat) -> None:
        """Store the state reported by the node."""
        self.last_heard = time.monotonic()
        self.is_alive, self.info = True, self.claimed
        self.is_accepting = heartbeat.ready
        self.queued_tokens = heartbeat.queued_tokens
        self.running = heartbeat.running
        surplus = max(0, heartbeat.running - len(self.active))
        self.num_others, self._num_others_lately = min(surplus, self._num_others_lately), surplus
        self.losses = heartbeat.losses
        self.run_delay = heartbeat.run_delay
        self.linked_nodes = heartbeat.linked
        self.is_leaving = heartbeat.leaving
        self.is_stuck = heartbeat.stuck
        self.load.take_report(heartbeat.load, heartbeat.answers)
        self.roles = heartbeat.roles
        self._answered = heartbeat.answers
        if self.roles is None and not self.is_elastic:
            self.role, self.role_is_fixed = self.added_as, False
        elif self.roles is not None and self._answered > self._ordered:
            self._take_role(self.roles)
        self.problem = "" if heartbeat.ready else "the node is not ready or drains"

    def update_info(self, info: ServerInfo) -> None:
        """Update the instance's description. We keep an equal object, because we then compare
        nothing again."""
        if info != self.claimed:
            self.claimed = info
        if self.is_alive:
            self.info = self.claimed

    def meet_instance(self, info: ServerInfo) -> None:
        """Prepare for a process that is new or was lost."""
        if info.instance_id != self.instance_id:
            self._administered = 0
        self.claimed, self.tree = info, None

    @property
    def awaits_heartbeat(self) -> bool:
        """Whether we met the node and it has not answered a message yet."""
        return self.channel is not None and not self.is_alive and self.problem == NO_HEARTBEAT_YET

    def has_answered(self, number: int) -> bool:
        """Whether the node answered the heartbeat with this number, or was lost since."""
        return self._answered >= number or not self.is_alive

    def fix_role(self, role: Role) -> None:
        """Set the role of an elastic node by order of an administrator."""
        self.role, self.role_is_fixed, self._frees_role = role, True, False

    def free_role(self) -> None:
        """Leave the role of an elastic node to proxies by order of an administrator."""
        self.role_is_fixed, self._frees_role = False, True

    def _take_role(self, state: RoleState) -> None:
        """Store the preferred role of an elastic node; without an order since its start, its
        initial one.

        We give up an administrator's role only for a later order of an administrator, or if we have
        since told the node to leave its role to proxies.
        """
        assert self.info is not None
        is_later = state.administered > self._administered
        self._frees_role &= state.fixed and not is_later
        if self._frees_role:
            return  # it does not know yet that its role is free
        if state.fixed or is_later or not self.role_is_fixed:
            self.role, self.role_is_fixed = state.role or self.info.role, state.fixed
        self._administered = state.administered

    @property
    def lacks_order(self) -> bool:
        """Whether an elastic node does not know an administrator's last order.

        It may have restarted or been out of reach, or the order was lost.
        """
        if self.roles is None or self._answered <= self._ordered:
            return False
        return self._frees_role if self.roles.fixed else self.role_is_fixed

    def order_role(self, sender: str, role: Role | None, *, fixed: bool) -> None:
        """Order an elastic node to prefer a role. Its next heartbeats show whether it does.

        Args:
            sender: this proxy.
            role: None leaves the role to the proxy with the lease.
            fixed: the order is an administrator's, which needs no lease.
        """
        assert self.roles is not None
        term = self.roles.term
        self._ordered = self.load.last_beat
        self.send_message(
            PreferRole(to=self.instance_id, sender=sender, role=role, fixed=fixed, term=term)
        )

    def mark_lost(self, problem: str) -> None:
        """Forget the state of a lost instance."""
        self.is_alive = self.is_accepting = self.is_leaving = self.is_stuck = False
        self.breaker = Breaker()
        self.hand_offs.clear()
        self.load, self.roles = LoadEstimate(), None
        self._answered = self._ordered = 0
        self.queued_tokens = self.running = self.pending_tokens = 0
        self.problem = problem

    def send_message(self, message: Message) -> bool:
        """Send a message. Return whether a connection accepted it."""
        self.is_connected = self.channel is not None and self.channel.send_message(message)
        self._sent_at = time.monotonic()
        return self.is_connected

    def send_heartbeat(
        self,
        sender: str,
        run_delays: dict[str, float] | None = None,
        meet: dict[str, str] | None = None,
    ) -> bool:
        """Send a heartbeat of the proxy ``sender``. Return whether the node is connected."""
        heartbeat = ProxyHeartbeat(
            to=self.instance_id,
            sender=sender,
            run_delay=RUN_DELAY.total,
            run_delays=run_delays or {},
            meet=meet or {},
            number=self.load.mark_heartbeat(),
            itl=self._itl,
            prefixes=self._prefixes_known,
            decides=self.wants_lease,
        )
        return self.send_message(heartbeat)

    def can_be_reached(self, sender: str) -> bool:
        """Whether the node is connected. We check it with a heartbeat, unless we just sent
        something."""
        is_known = time.monotonic() - self._sent_at < _JUST_NOW_SECONDS
        return self.is_connected if is_known else self.send_heartbeat(sender)

    def to_json(self) -> WorkerEntry:
        """Return the entry of ``GET /workers``."""
        return {
            "role": self.role,
            "url": self.url,
            "instance_id": self.instance_id or None,
            "model": self.info.model if self.info else None,
            "ready": self.is_ready,
            "draining": self.is_draining,
            "running": self.decode_load,
            "queued_tokens": self.prefill_load,
            "problem": self.problem
            or self.breaker.problem
            or (None if self.is_connected else "it cannot be reached"),
        }
