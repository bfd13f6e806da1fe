"""Chooses the nodes of a request."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

from pd.core.brief import short_repr
from pd.core.errors import NotFoundError, UnavailableError
from pd.proxy.routing.limits import Limits, measure_capacity
from pd.proxy.routing.policies import RouteChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.proxy.nodes.load_estimate import LoadEstimate
    from pd.proxy.nodes.node_handle import NodeHandle, ServerInfo
    from pd.proxy.routing.demand import Demand
    from pd.proxy.routing.policies import Policy
    from pd.proxy.routing.prediction import Predicted, Predictor

_PAIR = ("prefill", "decode")
# Reason for a choice made without the policy.
SAME_REQUEST = "same_request"
# Reason of routes that probe a node or a pair.
PROBE = "probe"


def _answers_like(node: NodeHandle, like: ServerInfo | None) -> bool:
    """Whether a node's answers continue those of ``like``, the node that began the request, if
    any."""
    if like is None or node.info is None:
        return like is None
    return node.info is like or like.find_answer_difference(node.info) is None


def _make_hand_off_check(
    apart: frozenset[tuple[NodeHandle, NodeHandle]],
) -> Callable[[NodeHandle, NodeHandle], bool]:
    """Return a function telling whether one node may send KV to another.

    The request had failed hand-offs between the pairs ``apart``.
    """

    def fit(first: NodeHandle, second: NodeHandle) -> bool:
        travels = (first, second) not in apart and first.can_hand_off_to(second)
        return travels and first.fits_with(second)

    return fit


def _is_ready(first: NodeHandle, second: NodeHandle | None = None) -> bool:
    """Whether the nodes can serve a request now. The last one generates."""
    if second is None:
        return first.is_ready and first.serves_alone
    return first.is_ready and second.is_ready and first.can_hand_off_to(second)


class SentLoad(NamedTuple):
    """Load added to nodes by an attempt. We remove it when the attempt ends.

    Attributes:
        prompts: load of the node prefilling in ``seconds``. For ``beat`` see
            :meth:`pd.proxy.nodes.load_estimate.LoadEstimate.end_prompt`.
        tokens: number of tokens held by ``streams``.
    """

    prompts: LoadEstimate
    seconds: float
    beat: int
    streams: int
    tokens: int

    def end_prompt(self) -> SentLoad:
        """Remove the prompt. Return the remaining load."""
        self.prompts.end_prompt(self.seconds, self.beat)
        return self._replace(seconds=0.0)


class Route(NamedTuple):
    """The nodes of an attempt. ``decode_node`` is None if the first node does everything.

    ``predicted``: the prediction for elastic nodes; None if the policy chose.
    """

    first_node: NodeHandle
    decode_node: NodeHandle | None
    reasons: list[tuple[NodeHandle, str]]
    predicted: Predicted | None = None

    def add_load(self, demand: Demand) -> SentLoad:
        """Add the load of the request to the nodes."""
        seconds, beat, streams, tokens = 0.0, 0, 0, 0
        if self.predicted is not None:
            seconds = self.predicted.prefill
            beat = self.first_node.load.add_prompt(seconds)
        if demand.output > 1:
            streams, tokens = demand.streams, demand.tokens
            (self.decode_node or self.first_node).load.add_streams(streams, tokens)
        return SentLoad(self.first_node.load, seconds, beat, streams, tokens)


def make_probe_route(first: NodeHandle, decode: NodeHandle) -> Route:
    """Make the route of a probe of a pair."""
    return Route(first, decode, [(first, PROBE), (decode, PROBE)])


def _drop_avoided(avoided: frozenset[NodeHandle], nodes: Sequence[NodeHandle]) -> list[NodeHandle]:
    """Drop avoided nodes, unless that leaves none."""
    return [node for node in nodes if node not in avoided] or list(nodes)


class Router:
    """Finds nodes with matching models and chooses among them.

    Elastic nodes are chosen by prediction, others by their roles and a policy.

    Args:
        predictor: None without ``--elastic auto``, and for policies without loads.
    """

    def __init__(
        self, policy: Policy, nodes: Sequence[NodeHandle], predictor: Predictor | None = None
    ) -> None:
        self.policy = policy
        self._nodes = nodes
        self._predictor = predictor

    @property
    def ttft(self) -> float:
        """Promised seconds until the first token; 0 without that objective."""
        return 0.0 if self._predictor is None else self._predictor.ttft or 0.0

    def can_serve(self) -> bool:
        """Whether at least one pair or unified node can serve."""
        return any(self._can_start(node, 0, 2) for node in self._nodes)

    def find_differences(self) -> list[str]:
        """Return reasons why nodes cannot work together."""
        infos = [w.info for w in self._nodes if w.is_ready and w.info]
        differences = [
            p.find_difference(d) for p in infos for d in infos if (p.role, d.role) == _PAIR
        ]
        return [difference for difference in dict.fromkeys(differences) if difference]

    def find_answer_differences(self) -> list[str]:
        """Return reasons why nodes of one model name give different answers."""
        first: dict[str, ServerInfo] = {}
        infos = [w.info for w in self._nodes if w.is_ready and w.info]
        differences = [
            first.setdefault(info.model, info).find_answer_difference(info) for info in infos
        ]
        return [difference for difference in dict.fromkeys(differences) if difference]

    def describe_problems(self) -> str:
        """Return reasons why nodes cannot be used, as the end of a message; empty if there are
        none."""
        problems = [f"{w.url}: {w.problem}" for w in self._nodes if w.problem]
        problems += self.find_differences()
        return f" ({'; '.join(problems)})" if problems else ""

    def list_models(self) -> list[str]:
        """List the served models, in the order of their nodes."""
        firsts = [w.info for w in self._nodes if w.info and w.computes_prompts]
        return list(dict.fromkeys(info.model for info in firsts))

    def _resolve_name(self, model: str, models: list[str]) -> str | None:
        """Resolve a client's name to the served name. Besides it, we accept the directory of the
        model, and ``default`` if there is only one model."""
        if model in models:
            return model
        if model == "default" and len(models) == 1:
            return models[0]
        firsts = [w.info for w in self._nodes if w.info and w.computes_prompts]
        return {info.model_path: info.model for info in firsts}.get(model)

    def get_limits(self, model: str | None) -> Limits:
        """Return the limits of a model's requests (None: of the first model), including lost nodes.

        Raises NotFoundError for an unknown model, UnavailableError before any node is known.
        """
        models = self.list_models()
        if not models:
            raise UnavailableError("no node was reached yet" + self.describe_problems())
        name = models[0] if model is None else self._resolve_name(model, models)
        if name is None:
            raise NotFoundError(
                f"there is no model {short_repr(model)}; served: {', '.join(models)}", param="model"
            )
        groups = [
            group
            for w in self._nodes
            if w.info and w.info.model == name and w.computes_prompts
            for group in self._list_groups(w)
        ]
        routes = [measure_capacity(group) for group in groups]
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

    def list_pools(self, model: str) -> list[ServerInfo]:
        """List the nodes generating answers of a model, or its other nodes if there are none."""
        infos = [
            (node.can_receive or node.serves_alone, node.info)
            for node in self._nodes
            if node.info and node.info.model == model
        ]
        return [info for generates, info in infos if generates] or [info for _, info in infos]

    def get_vocab_size(self, model: str) -> int | None:
        """Return the size of a model's vocabulary, if a node reports it."""
        infos = (node.info for node in self._nodes)
        return next((info.vocab_size for info in infos if info and info.model == model), None)

    def choose_route(
        self,
        model: str,
        demand: Demand,
        *,
        preferred: NodeHandle | None = None,
        avoided: frozenset[NodeHandle] = frozenset(),
        apart: frozenset[tuple[NodeHandle, NodeHandle]] = frozenset(),
        like: ServerInfo | None = None,
    ) -> Route:
        """Choose nodes. Raises UnavailableError if none can serve the request now.

        Args:
            preferred: node to prefill if it can, whatever the policy says.
            avoided: nodes we take only if there are no others.
            apart: pairs we take only if there are no others. A node serving alone is better.
            like: node that began the request. Others must answer alike.
        """
        firsts = self._list_firsts(model, demand, like)
        if not firsts:
            self._check_alike(self._list_firsts(model, demand), like)
            raise UnavailableError(
                "no node can serve the request at present"
                + (
                    self.describe_problems()
                    or f": ready nodes cannot hold its {demand.length} tokens and {demand.output} "
                    "of an answer"
                )
            )
        if preferred is None:
            route = self._route_by_prediction(model, firsts, demand, avoided, apart)
            if route is not None:
                return route
        return self._route_by_roles(firsts, demand, preferred, avoided, apart)

    def get_shortest_queue(self, source: NodeHandle) -> float | None:
        """Return how long a prompt would wait at the least loaded other elastic node of the model.

        None if there is no such node or no prediction.
        """
        info = source.info
        if self._predictor is None or info is None:
            return None
        queues = (
            node.load.queue_seconds
            for node in self._nodes
            if node is not source and node.is_ready and node.load.reported is not None
            if node.info is not None and node.info.model == info.model
        )
        return min(queues, default=None)

    def find_better(
        self,
        model: str,
        demand: Demand,
        present: Predicted,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Predicted | None:
        """Return better nodes for a waiting request; None if it should stay. See
        :meth:`choose_route` and :meth:`pd.proxy.routing.prediction.Predictor.find_better`."""
        if self._predictor is None:
            return None
        among = self._list_predictable(model, self._list_firsts(model, demand), demand, avoided)
        if among is None:
            return None
        like = present.first_node.info
        firsts = [n for n in among[0] if n is not present.first_node and _answers_like(n, like)]
        return self._predictor.find_better(
            present, firsts, among[1], demand, _make_hand_off_check(apart)
        )

    def _list_firsts(
        self, model: str, demand: Demand, like: ServerInfo | None = None
    ) -> list[NodeHandle]:
        """List nodes for the prompt."""
        return [
            node
            for node in self._nodes
            if node.info
            and node.info.model == model
            and self._can_start(node, demand.length, demand.output)
            and _answers_like(node, like)
        ]

    @staticmethod
    def _check_alike(nodes: Sequence[NodeHandle], like: ServerInfo | None) -> None:
        """Raise UnavailableError if nodes could serve, but would answer differently."""
        differences = [
            like.find_answer_difference(node.info) for node in nodes if like and node.info
        ]
        if differences:
            raise UnavailableError(
                "no node can continue the request: ready nodes would answer differently from the "
                f"node that began it ({differences[0]})"
            )

    def _list_decoders(self, model: str, demand: Demand) -> list[NodeHandle]:
        """List nodes for the answer; none for a single token."""
        if demand.output <= 1:
            return []
        return [
            node
            for node in self._nodes
            if node.can_take(demand.length, demand.output)
            and node.info
            and node.info.model == model
        ]

    def _list_predictable(
        self,
        model: str,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        avoided: frozenset[NodeHandle],
    ) -> tuple[list[NodeHandle], list[NodeHandle]] | None:
        """List nodes for the prompt and nodes for the answer.

        Return None if one of them does not report its load, because we cannot predict choices with
        it.
        """
        decoders = self._list_decoders(model, demand)
        if not all(node.is_elastic for node in (*firsts, *decoders)):
            return None
        return _drop_avoided(avoided, firsts), _drop_avoided(avoided, decoders)

    def _route_by_prediction(
        self,
        model: str,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Route | None:
        """Return the route with the best prediction; None if we cannot predict."""
        if self._predictor is None:
            return None
        among = self._list_predictable(model, firsts, demand, avoided)
        if among is None:
            return None
        best = self._predictor.choose_nodes(*among, demand, _make_hand_off_check(apart))
        if best is None:
            return None
        reasons = [(best.first_node, best.way)]
        if best.decode_node is best.first_node:
            return Route(best.first_node, None, reasons, best)
        return Route(
            best.first_node, best.decode_node, [*reasons, (best.decode_node, best.way)], best
        )

    def _route_by_roles(
        self,
        firsts: Sequence[NodeHandle],
        demand: Demand,
        preferred: NodeHandle | None,
        avoided: frozenset[NodeHandle],
        apart: frozenset[tuple[NodeHandle, NodeHandle]],
    ) -> Route:
        """Let the policy choose among nodes with the right roles, or else among all able nodes."""
        prompt = demand.prompt
        if preferred is not None and preferred in firsts:
            first, reason = RouteChoice(preferred, SAME_REQUEST)
        else:
            sound = _drop_avoided(avoided, firsts)
            if apart:
                sound = [w for w in sound if self._is_joined(w, demand, apart)] or sound
            in_role = [node for node in sound if node.role != "decode"]
            first, reason = self.policy.choose_prefill(in_role or sound, prompt)
        reasons = [(first, reason)]
        suffices = self._is_sufficient(first, demand.length, demand.output)
        if suffices and (first.role == "unified" or demand.output <= 1):
            return Route(first, None, reasons)
        partners = _drop_avoided(avoided, self._find_partners(first, demand.length, demand.output))
        joined = [node for node in partners if (first, node) not in apart]
        in_role = [node for node in joined if node.role == "decode"]
        if suffices and not in_role:
            return Route(first, None, reasons)
        decode, reason = self.policy.choose_decode(in_role or joined or partners, prompt)
        return Route(first, decode, [*reasons, (decode, reason)])

    def _is_joined(
        self, first: NodeHandle, demand: Demand, apart: frozenset[tuple[NodeHandle, NodeHandle]]
    ) -> bool:
        """Whether a node can serve the request alone or with a partner not apart from it."""
        partners = self._find_partners(first, demand.length, demand.output)
        return self._is_sufficient(first, demand.length, demand.output) or any(
            (first, node) not in apart for node in partners
        )

    def choose_alone(
        self,
        model: str,
        demand: Demand,
        avoided: frozenset[NodeHandle] = frozenset(),
        like: ServerInfo | None = None,
    ) -> Route:
        """Choose a decode node to resume a request alone, because no node of another role can.

        Raises UnavailableError without one.
        """
        able = [
            node
            for node in self._nodes
            if node.role == "decode" and node.info and node.info.model == model
            if node.can_take(demand.length, demand.output)
        ]
        alike = [node for node in able if _answers_like(node, like)]
        if not alike:
            self._check_alike(able, like)
            raise UnavailableError("no node can continue the request" + self.describe_problems())
        node, reason = self.policy.choose_decode(_drop_avoided(avoided, alike), demand.prompt)
        return Route(node, None, [(node, reason)])

    def choose_probe_route(self, node: NodeHandle) -> Route | None:
        """Choose nodes to probe a node disabled by its breaker; None without a partner.

        If all partners are disabled, too, the probe tests them and their pairs as well.
        """
        if node.serves_alone:
            return Route(node, None, [(node, PROBE)])
        if node.role == "prefill":
            partners = self._find_matching(node)
        else:
            firsts = [p for p in self._nodes if p.computes_prompts]
            partners = [p for p in firsts if self._find_matching(p, [node])]
        partners = [w for w in partners if w.is_ready or (w.could_serve and not w.breaker.is_stuck)]
        if not partners:
            return None

        def pair(partner: NodeHandle) -> tuple[NodeHandle, NodeHandle]:
            return (node, partner) if node.role == "prefill" else (partner, node)

        def rank(partner: NodeHandle) -> tuple[bool, bool, int]:
            first, decode = pair(partner)
            return not partner.is_ready, not first.can_hand_off_to(decode), partner.decode_load

        return make_probe_route(*pair(min(partners, key=rank)))

    def _can_start(self, node: NodeHandle, size: int, output: int) -> bool:
        """Whether a node may prefill a prompt of this size, with an answer of this length."""
        if not node.computes_prompts or not node.can_take(size):
            return False
        return self._is_sufficient(node, size, output) or bool(
            self._find_partners(node, size, output)
        )

    @staticmethod
    def _is_sufficient(node: NodeHandle, size: int, output: int) -> bool:
        """Whether a node can generate the answer to its own prompt."""
        return output <= 1 or (node.serves_alone and node.can_take(size, output))

    def _find_partners(self, first: NodeHandle, size: int, output: int) -> list[NodeHandle]:
        if not first.can_send:
            return []
        fitting = [d for d in self._nodes if d.can_take(size, output) and first.can_hand_off_to(d)]
        return self._find_matching(first, fitting)

    def _find_matching(
        self, first: NodeHandle, others: Sequence[NodeHandle] | None = None
    ) -> list[NodeHandle]:
        """List the nodes of ``others`` (None: all) able to answer prompts of ``first``."""
        among = self._nodes if others is None else others
        return [d for d in among if d is not first and d.can_receive and first.fits_with(d)]

    def _list_groups(self, first: NodeHandle) -> list[list[NodeHandle]]:
        """List the groups of nodes able to serve a request prefilled by ``first``.

        We leave out pairs of elastic nodes, because together they can do no more than either alone.
        """
        others = [w for w in self._nodes if not (first.is_elastic and w.is_elastic)]
        partners = self._find_matching(first, others) if first.can_send else []
        groups = [[first, decode] for decode in partners]
        return [*groups, [first]] if first.serves_alone or not groups else groups
