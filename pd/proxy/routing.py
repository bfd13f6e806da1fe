"""Chooses the nodes that work on a request."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from pd.core.brief import brief
from pd.core.errors import NotFoundError, UnavailableError
from pd.proxy.limits import Limits, capacity_of
from pd.proxy.policies import RouteChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.load_estimate import LoadEstimate
    from pd.proxy.node_handle import NodeHandle, ServerInfo
    from pd.proxy.policies import Policy
    from pd.proxy.prediction import Demand, Predicted, Predictor

_PAIR = ("prefill", "decode")
# Why a node was chosen, where the policy was not asked.
SAME_REQUEST = "same_request"
# Reason of routes that probe a node or a pair.
PROBE = "probe"


def _fit(first: NodeHandle, second: NodeHandle) -> bool:
    """Whether KV that one node has computed is of use to the other."""
    if first.info is None or second.info is None:
        return False
    return first.info.difference(second.info) is None


def _travels(
    apart: frozenset[tuple[NodeHandle, NodeHandle]],
) -> Callable[[NodeHandle, NodeHandle], bool]:
    """Return a function that says whether KV may be sent from one node to another, for a request
    to which these pairs are apart."""

    def fit(first: NodeHandle, second: NodeHandle) -> bool:
        travels = (first, second) not in apart and first.hands_off_to(second)
        return travels and _fit(first, second)

    return fit


def _is_ready(first: NodeHandle, second: NodeHandle | None = None) -> bool:
    """Whether nodes, of which the last one generates, can serve a request now."""
    if second is None:
        return first.ready and first.serves_alone
    return first.ready and second.ready and first.hands_off_to(second)


class SentLoad(NamedTuple):
    """Load that was sent to nodes with an attempt, to be taken off when it is over.

    Attributes:
        prompts: the load of the node that computes the prompt, for which that takes ``seconds``;
            ``beat``: see :meth:`pd.proxy.load_estimate.LoadEstimate.prompt_over`.
        tokens: of its ``streams``.
    """

    prompts: LoadEstimate
    seconds: float
    beat: int
    streams: int
    tokens: int

    def prompt_over(self) -> SentLoad:
        """Take the prompt off; returns what is left."""
        self.prompts.prompt_over(self.seconds, self.beat)
        return self._replace(seconds=0.0)


class Route(NamedTuple):
    """The nodes of one attempt; ``decode`` None where the first does everything.

    ``predicted``: what elastic nodes were chosen by; None where the policy chose by roles.
    """

    first: NodeHandle
    decode: NodeHandle | None
    reasons: list[tuple[NodeHandle, str]]
    predicted: Predicted | None = None

    def sent(self, demand: Demand) -> SentLoad:
        """Note at the nodes what they were sent."""
        seconds, beat, streams, tokens = 0.0, 0, 0, 0
        if self.predicted is not None:
            seconds = self.predicted.prefill
            beat = self.first.load.prompt_sent(seconds)
        if demand.output > 1:
            streams, tokens = demand.streams, demand.tokens
            (self.decode or self.first).load.stream_sent(streams, tokens)
        return SentLoad(self.first.load, seconds, beat, streams, tokens)


def probe_route(first: NodeHandle, decode: NodeHandle) -> Route:
    """The route of a probe of a pair."""
    return Route(first, decode, [(first, PROBE), (decode, PROBE)])


def _without(avoided: frozenset[NodeHandle], nodes: Sequence[NodeHandle]) -> list[NodeHandle]:
    """The nodes that are not avoided; all of them if there are no others."""
    return [node for node in nodes if node not in avoided] or list(nodes)


class Router:
    """Finds nodes that fit together and chooses among them: elastic ones by prediction, others by
    their roles and a policy.

    Args:
        predictor: None without ``--elastic auto``, and for policies that do not look at loads.
    """

    def __init__(
        self, policy: Policy, nodes: Sequence[NodeHandle], predictor: Predictor | None = None
    ) -> None:
        self.policy = policy
        self._nodes = nodes
        self._predictor = predictor

    @property
    def ttft(self) -> float:
        """Seconds until the first token that are promised; 0 without that objective."""
        return 0.0 if self._predictor is None else self._predictor.ttft or 0.0

    def ready(self) -> bool:
        """Whether at least one pair (or unified node) can serve."""
        return any(self._can_start(node, 0, 2) for node in self._nodes)

    def differences(self) -> list[str]:
        """Reasons why nodes that are there cannot work together."""
        infos = [w.info for w in self._nodes if w.ready and w.info]
        found = [p.difference(d) for p in infos for d in infos if (p.role, d.role) == _PAIR]
        return [difference for difference in dict.fromkeys(found) if difference]

    def reasons(self) -> str:
        """Reasons why nodes cannot be used, as the end of a message; empty if all can."""
        problems = [f"{w.url}: {w.problem}" for w in self._nodes if w.problem]
        problems += self.differences()
        return f" ({'; '.join(problems)})" if problems else ""

    def models(self) -> list[str]:
        """Served models, in the order in which nodes were named."""
        firsts = [w.info for w in self._nodes if w.info and w.computes_prompts]
        return list(dict.fromkeys(info.model for info in firsts))

    def _named(self, model: str, models: list[str]) -> str | None:
        """The served name that a client means: also the model's directory, and ``default`` where
        there is one model."""
        if model in models:
            return model
        if model == "default" and len(models) == 1:
            return models[0]
        firsts = [w.info for w in self._nodes if w.info and w.computes_prompts]
        return {info.model_path: info.model for info in firsts}.get(model)

    def limits(self, model: str | None) -> Limits:
        """Limits of a model's requests (None: of the first model), by nodes that are there or were.

        Raises NotFoundError for an unknown model, UnavailableError if nothing is known yet.
        """
        models = self.models()
        if not models:
            raise UnavailableError("no node was reached yet" + self.reasons())
        name = models[0] if model is None else self._named(model, models)
        if name is None:
            raise NotFoundError(
                f"there is no model {brief(model)}; served: {', '.join(models)}", param="model"
            )
        groups = [
            group
            for w in self._nodes
            if w.info and w.info.model == name and w.computes_prompts
            for group in self._groups(w)
        ]
        routes = [capacity_of(group) for group in groups]
        info = groups[routes.index(max(routes))][0].info
        assert info is not None
        are_ready = [_is_ready(*group) for group in groups]
        return Limits(
            name,
            frozenset(routes),
            frozenset(compress(routes, are_ready)),
            info.vocab_size,
            info.model_path,
            info.sampling_defaults,
        )

    def pools(self, model: str) -> list[ServerInfo]:
        """The nodes that generate answers of a served model; others while none of these is
        known."""
        infos = [
            (node.receives or node.serves_alone, node.info)
            for node in self._nodes
            if node.info and node.info.model == model
        ]
        return [info for generates, info in infos if generates] or [info for _, info in infos]

    def vocab_size(self, model: str) -> int | None:
        """The size of a model's vocabulary, if its nodes say so."""
        infos = (node.info for node in self._nodes)
        return next((info.vocab_size for info in infos if info and info.model == model), None)

    def route(
        self,
        model: str,
        demand: Demand,
        *,
        preferred: NodeHandle | None = None,
        avoided: frozenset[NodeHandle] = frozenset(),
        apart: frozenset[tuple[NodeHandle, NodeHandle]] = frozenset(),
    ) -> Route:
        """Choose nodes. Raises UnavailableError if none can serve this now.

        Args:
            preferred: the node that computes the prompt, whatever the policy says, if it can.
            avoided: nodes that are taken only if there are no others.
            apart: pairs of which the same holds; a node that serves alone is better.
        """
        firsts = self._firsts(model, demand)
        if not firsts:
            raise UnavailableError(
                "no node can serve the request at present"
                + (
                    self.reasons()
                    or f": those that are ready cannot hold its {demand.length} tokens and "
                    f"{demand.output} of an answer"
                )
            )
        if (
            preferred is None
            and (route := self._predicted(model, firsts, demand, avoided, apart)) is not None
        ):
            return route
        return self._by_roles(firsts, demand, preferred, avoided, apart)

    def shortest_queue(self, source: NodeHandle) -> float | None:
        """Seconds for which a prompt would wait at the least loaded elastic node of the same model
        but this one; None if there is no other, or if nodes are not chosen by prediction."""
        info = source.info
        if self._predictor is None or info is None:
            return None
        found = (
            node.load.queue_seconds
            for node in self._nodes
            if node is not source and node.ready and node.load.reported is not None
            if node.info is not None and node.info.model == info.model
        )
        return min(found, default=None)

    def better(
        self,
        model: str,
        demand: Demand,
        present: Predicted,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Predicted | None:
        """Nodes to which a waiting request should move; None if it should stay. See
        :meth:`pd.proxy.prediction.Predictor.better`, and :meth:`route` for what is ``avoided`` and
        ``apart``."""
        among = self._predictable(model, self._firsts(model, demand), demand, avoided)
        if self._predictor is None or among is None:
            return None
        firsts = [node for node in among[0] if node is not present.first]
        return self._predictor.better(present, firsts, among[1], demand, _travels(apart))

    def _firsts(self, model: str, demand: Demand) -> list[NodeHandle]:
        """Nodes that may compute the prompt."""
        return [
            node
            for node in self._nodes
            if node.info
            and node.info.model == model
            and self._can_start(node, demand.length, demand.output)
        ]

    def _decoders(self, model: str, demand: Demand) -> list[NodeHandle]:
        """Nodes that may generate the answer; none if one token is wanted."""
        if demand.output <= 1:
            return []
        return [
            node
            for node in self._nodes
            if node.can_take(demand.length, demand.output)
            and node.info
            and node.info.model == model
        ]

    def _predictable(
        self,
        model: str,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        avoided: frozenset[NodeHandle],
    ) -> tuple[list[NodeHandle], list[NodeHandle]] | None:
        """Nodes that may compute the prompt, of ``firsts``, and that may generate the answer; None
        where some node does not report its load, so that nothing can be said of a choice with
        it."""
        decoders = self._decoders(model, demand)
        if not all(node.elastic for node in (*firsts, *decoders)):
            return None
        return _without(avoided, firsts), _without(avoided, decoders)

    def _predicted(
        self,
        model: str,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Route | None:
        """The route with the best prediction; None where nothing can be predicted."""
        among = self._predictable(model, firsts, demand, avoided)
        if self._predictor is None or among is None:
            return None
        best = self._predictor.choose(*among, demand, _travels(apart))
        if best is None:
            return None
        reasons = [(best.first, best.way)]
        if best.decode is best.first:
            return Route(best.first, None, reasons, best)
        return Route(best.first, best.decode, [*reasons, (best.decode, best.way)], best)

    def _by_roles(
        self,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        preferred: NodeHandle | None,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Route:
        """The policy's choice among the nodes that have the roles, or else can do what they do."""
        prompt = demand.prompt
        if preferred is not None and preferred in firsts:
            first, reason = RouteChoice(preferred, SAME_REQUEST)
        else:
            sound = _without(avoided, firsts)
            if apart:
                sound = [w for w in sound if self._is_joined(w, demand, apart)] or sound
            in_role = [node for node in sound if node.role != "decode"]
            first, reason = self.policy.prefill(in_role or sound, prompt)
        reasons = [(first, reason)]
        suffices = self._suffices(first, demand.length, demand.output)
        if suffices and (first.role == "unified" or demand.output <= 1):
            return Route(first, None, reasons)
        partners = _without(avoided, self._partners(first, demand.length, demand.output))
        joined = [node for node in partners if (first, node) not in apart]
        in_role = [node for node in joined if node.role == "decode"]
        if suffices and not in_role:
            return Route(first, None, reasons)
        decode, reason = self.policy.decode(in_role or joined or partners, prompt)
        return Route(first, decode, [*reasons, (decode, reason)])

    def _is_joined(
        self, first: NodeHandle, demand: Demand, apart: frozenset[tuple[NodeHandle, NodeHandle]]
    ) -> bool:
        """Whether a node can serve the request alone, or with one from which it is not apart."""
        partners = self._partners(first, demand.length, demand.output)
        return self._suffices(first, demand.length, demand.output) or any(
            (first, node) not in apart for node in partners
        )

    def route_alone(
        self, model: str, demand: Demand, avoided: frozenset[NodeHandle] = frozenset()
    ) -> Route:
        """Choose a decode node that computes a resumed request by itself, where no node of another
        role can. Raises UnavailableError if there is none."""
        found = [
            node
            for node in self._nodes
            if node.role == "decode" and node.info and node.info.model == model
            if node.can_take(demand.length, demand.output)
        ]
        if not found:
            raise UnavailableError("no node can go on with the request" + self.reasons())
        node, reason = self.policy.decode(_without(avoided, found), demand.prompt)
        return Route(node, None, [(node, reason)])

    def route_to(self, node: NodeHandle) -> Route | None:
        """Nodes for a probe of one that a breaker took out; None if it has no partner. Partners
        that are out, too, are probed with it if there are no others, and so are their pairs."""
        if node.serves_alone:
            return Route(node, None, [(node, PROBE)])
        if node.role == "prefill":
            partners = self._matching(node)
        else:
            firsts = [p for p in self._nodes if p.computes_prompts]
            partners = [p for p in firsts if self._matching(p, [node])]
        partners = [w for w in partners if w.ready or (w.could_serve and not w.breaker.stuck)]
        if not partners:
            return None

        def pair(partner: NodeHandle) -> tuple[NodeHandle, NodeHandle]:
            return (node, partner) if node.role == "prefill" else (partner, node)

        def rank(partner: NodeHandle) -> tuple[bool, bool, int]:
            first, decode = pair(partner)
            return not partner.ready, not first.hands_off_to(decode), partner.decode_load

        return probe_route(*pair(min(partners, key=rank)))

    def _can_start(self, node: NodeHandle, size: int, output: int) -> bool:
        """Whether a node may compute a prompt of this size, with an answer of so many tokens."""
        if not node.computes_prompts or not node.can_take(size):
            return False
        return self._suffices(node, size, output) or bool(self._partners(node, size, output))

    @staticmethod
    def _suffices(node: NodeHandle, size: int, output: int) -> bool:
        """Whether a node that may compute the prompt needs no other for the answer."""
        return output <= 1 or (node.serves_alone and node.can_take(size, output))

    def _partners(self, first: NodeHandle, size: int, output: int) -> list[NodeHandle]:
        if not first.sends:
            return []
        fitting = [d for d in self._nodes if d.can_take(size, output) and first.hands_off_to(d)]
        return self._matching(first, fitting)

    def _matching(
        self, first: NodeHandle, others: Sequence[NodeHandle] | None = None
    ) -> list[NodeHandle]:
        """Return the nodes of ``others``, or of all, that can answer prompts which ``first``
        computes."""
        among = self._nodes if others is None else others
        return [d for d in among if d is not first and d.receives and _fit(first, d)]

    def _groups(self, first: NodeHandle) -> list[list[NodeHandle]]:
        """Nodes that could serve a request whose prompt this one computes. With another elastic
        node an elastic one can do no more than either alone."""
        others = [w for w in self._nodes if not (first.elastic and w.elastic)]
        partners = self._matching(first, others) if first.sends else []
        groups = [[first, decode] for decode in partners]
        return [*groups, [first]] if first.serves_alone or not groups else groups
