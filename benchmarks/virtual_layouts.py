"""Predict under virtual time how many requests elastic nodes serve within objectives.

Proxies know the objectives (`--slo-ttft-ms`, `--slo-itl-ms`), or do not.

    python benchmarks/virtual_layouts.py --trace FILE [--windows 900:912 300:312] [--bursts 0 3] \\
        [--rates 35000 50000] [--slo 1000:25 500:25] [--output-tokens 48] [--output FILE]

A proxy's choices and moves are real, and so are the schedulers of a prefill and a decode node.
Steps take as long as on an H200 (`GPU`); messages, transfers and the host take no time. The same
load therefore ends in the same way on any machine. Each window of the trace is stretched to
`--rates` prompt tokens per second. With `--bursts` above 0, requests arrive only every so many
seconds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402
from pd.core.config import NodeConfig  # noqa: E402
from pd.core.messages import HEARTBEAT_INTERVAL, Generate  # noqa: E402
from pd.core.sampling_params import SamplingParams  # noqa: E402
from pd.core.step_cost import StepCost  # noqa: E402
from pd.engine.page_allocator import PageState  # noqa: E402
from pd.node.load import node_load  # noqa: E402
from pd.proxy.dispatch.moves import Moves  # noqa: E402
from pd.proxy.nodes.node_handle import Endpoints, NodeHandle, Pages, ServerInfo  # noqa: E402
from pd.proxy.routing.demand import Demand, Prompt  # noqa: E402
from pd.proxy.routing.policies import CacheAware  # noqa: E402
from pd.proxy.routing.prediction import Predictor  # noqa: E402
from pd.proxy.routing.routing import Router  # noqa: E402
from pd.radix import RadixCache  # noqa: E402
from pd.scheduling.admission_policy import AdmissionPolicy  # noqa: E402
from pd.scheduling.combined import CombinedScheduler  # noqa: E402
from pd.scheduling.cost_model import CostModel, step_shape  # noqa: E402
from pd.scheduling.decode import DecodeScheduler  # noqa: E402
from pd.scheduling.memory import Memory  # noqa: E402
from pd.scheduling.metrics import RequestMetrics  # noqa: E402
from pd.scheduling.prefill import PrefillScheduler  # noqa: E402
from pd.scheduling.request import Request, RequestState  # noqa: E402
from pd.scheduling.waiting_queue import WaitingQueue  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Llama-3.1-8B's shape in bfloat16 on one H200, as in simulated_layouts.py.
GPU = StepCost(
    base=4.3e-3, middle=18e-6, rest=20e-6, pair=1.05e-9, context=40e-9, stream=5e-6, graphs=1024
)
_PAGE = 64
# Longer prompts do not fit into half of a pool if others run, too.
LONGEST_PROMPT = 90_000
_TOKEN = 7
_SILENT = SimpleNamespace(error=None, token_id=_TOKEN, logprobs=None)


class Arrival(NamedTuple):
    """A request of a load: seconds, and tokens of its prompt and answer."""

    at: float
    prompt: int
    output: int


class Served(NamedTuple):
    """The outcome of a request.

    Attributes:
        ttft, tpot: seconds; tpot 0 of an answer of one token.
    """

    arrival: Arrival
    ttft: float
    tpot: float


class Clock:
    """Virtual time. Events happen in order, at equal times in the order of their creation."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def run(self, *, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, happen = heapq.heappop(self._events)
            happen()


class _Sending:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def tell_expected(self, request: Request, seconds: float) -> None:
        job = self._simulation.jobs[request.room]
        job.expected_at = self._simulation.clock.now + seconds

    def on_prompt_computed(self, request: Request) -> None:
        self._simulation.hand_off(self._simulation.jobs[request.room])

    def will_leave(self, request: Request) -> bool:
        return request.outgoing is not None

    def start_sending(self, request: Request) -> None: ...
    def make_layer_sender(self, works: Any) -> None: ...
    def on_chunk_computed(self, work: Any) -> None: ...
    def park_prompts(self, pages: int) -> None: ...
    def return_reservations(self) -> None: ...


class _Receiving:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.jobs: dict[bytes, Job] = {}  # with pages here
        self.waiting: list[Job] = []  # without

    is_stalled = False

    @property
    def awaits_kv(self) -> bool:
        return bool(self.jobs)

    def iter_expected(self, seconds: float, late: float = float("inf")) -> Iterator[Request]:
        now = self._clock.now
        for job in self.jobs.values():
            at = job.expected_at
            if at is not None and now - late <= at < now + seconds:
                assert job.answer is not None
                yield job.answer

    def iter_queued(self) -> Iterator[Any]:
        for job in (*self.jobs.values(), *self.waiting):
            assert job.answer is not None
            yield job.answer.sequence

    @property
    def queued_tokens(self) -> int:
        return sum(job.arrival.prompt for job in self.waiting)


class Node:
    """An elastic node without a process."""

    def __init__(self, simulation: Simulation, role: Any, name: str, itl: float) -> None:
        self.simulation, self.clock = simulation, simulation.clock
        pages = simulation.pool_tokens // _PAGE
        config = NodeConfig(
            role=role,
            model=Path("."),
            page_size=_PAGE,
            elastic="auto",
            kv_cache_tokens=pages * _PAGE,
        )
        model = SimpleNamespace(eos_token_ids=(), vocab_size=1 << 20)
        costs = CostModel(GPU.graphs)
        costs.cost = GPU
        self.memory = Memory(pages, _PAGE, RadixCache(_PAGE))
        requests: Any = SimpleNamespace(emit_output=self._emit, finish_request=self._finish)
        lengths = SimpleNamespace(forget_sequence=lambda sequence: None)
        engine = SimpleNamespace(
            pool=SimpleNamespace(count_page_bytes=lambda layout: 1),
            layout=None,
            model_config=model,
            save_pages=lambda pages: SimpleNamespace(restore_pages=lambda pages, first: None),
        )
        self.core: Any = SimpleNamespace(
            memory=self.memory,
            engine=engine,
            config=config,
            metrics=RequestMetrics(),
            requests=requests,
            fail_choice=None,
            drafter=None,
            draft_lengths=lengths,
            costs=costs,
            events=SimpleNamespace(want_reservations=lambda: None),
        )
        waiting = WaitingQueue.from_config(config, self.memory.radix, costs)
        if waiting._by_due is not None:
            waiting._by_due._clock = self.clock.monotonic
        decode = DecodeScheduler(self.core)
        self.receiving = _Receiving(self.clock)
        sending: Any = _Sending(simulation)
        admission = AdmissionPolicy(self.memory, sending=sending)
        self.prefill = PrefillScheduler(self.core.engine, self.memory, waiting, admission)
        receiving: Any = self.receiving
        self.scheduler = CombinedScheduler(self.core, self.prefill, decode, sending, receiving)
        assert self.scheduler.slices is not None
        self.scheduler.slices.wanted_itl = itl
        self.scheduler.prompt_share._clock = self.clock.monotonic
        self.scheduler.prompt_share._at = self.clock.now
        self.busy = False
        self._ends = 0.0
        self.handle = NodeHandle(role, f"http://{name}", itl)
        self.handle.claimed = self.handle.info = ServerInfo(
            role=role,
            instance_id=name,
            model="m",
            page_size=_PAGE,
            context_length=200_000,
            endpoints=Endpoints("tcp://x:1", f"http://boot-{name}"),
            pages=Pages(pages),
            elastic=True,
        )
        self.handle.is_alive = self.handle.is_accepting = True
        self.handle.send_message = self._take_back  # type: ignore[method-assign, assignment]
        self.report()

    def report(self) -> None:
        receiving: Any = self.receiving
        under_way = max(0.0, self._ends - self.clock.now) if self.busy else 0.0
        load = node_load(self.core, self.scheduler, receiving, under_way)
        self.handle.load.take_report(load, self.handle.load.mark_heartbeat())

    def pump(self) -> None:
        """Reserve pages for answers, and begin a step if there is anything to compute."""
        while self.receiving.waiting:
            job = self.receiving.waiting[0]
            assert job.answer is not None
            sequence = job.answer.sequence
            if self.scheduler.decode.needs_memory or not self.memory.grow_pages(
                sequence, job.arrival.prompt, PageState.RESERVED
            ):
                break
            self.receiving.waiting.pop(0)
            self.receiving.jobs[job.room] = job
            job.first_node.prefill.add_request(job.prompt)
            job.first_node.wake()
        self.wake()

    def wake(self) -> None:
        if self.busy:
            return
        works = self.scheduler.plan_step()
        if not works:
            return
        shape = step_shape(works)
        self.busy = True
        seconds = GPU.predict_seconds(shape)
        self._ends = self.clock.now + seconds
        self.clock.at(self._ends, lambda: self._step_over(works, shape, seconds))

    def _step_over(self, works: list[Any], shape: Any, seconds: float) -> None:
        self.busy = False
        for work in works:
            work.sampled = [_SILENT for _ in work.samples]
        self.scheduler.process_step(works)
        self.scheduler.prompt_share.observe_step(GPU, shape)
        self.pump()

    def _emit(self, request: Request, output: Any) -> None:
        self.simulation.jobs[request.room].output(len(output.token_ids))

    def _finish(self, request: Request) -> None:
        if not request.state.is_terminal:
            request.state = RequestState.DONE
            for sequence in request.sequences:
                if len(sequence.pages):
                    self.memory.release_pages(sequence)
            self.simulation.finish(self.simulation.jobs[request.room])

    def _take_back(self, message: Any) -> bool:
        job = self.simulation.jobs[message.room]
        answer = SimpleNamespace(room=message.room, taken=False)
        if job.first_node is self and job.first_token is None and job.waits():
            self.simulation.withdraw(job)
            answer.taken = True
        self.clock.at(
            self.clock.now, lambda: self.simulation.moves.handle_answer(self.handle, answer)
        )
        return True


class Job:
    """A request, with the part of an attempt that :mod:`pd.proxy.dispatch.moves` needs."""

    is_whole = True

    def __init__(self, simulation: Simulation, arrival: Arrival, number: int) -> None:
        self.simulation, self.arrival, self.number = simulation, arrival, number
        self.room = number.to_bytes(16, "little")
        self.tokens = np.full(arrival.prompt, number + 10, np.int32)
        self.first_token: float | None = None
        self.last_token = 0.0
        self.count = 0
        self.progress = 0
        self.has_begun = False
        self.is_over = False
        self.expected_at: float | None = None
        self.moves = 0
        self.sent_load: Any = None
        self.answer: Request | None = None
        self.generation = SimpleNamespace(
            spec=SimpleNamespace(model="m", namespace=""),
            job=SimpleNamespace(is_batch=False),
            created=simulation.clock.now,
        )
        self.choices = (None,)
        self.token_ids, self.produced = self.tokens, 0
        self.params = SimpleNamespace(max_tokens=arrival.output)

    @property
    def history(self) -> Any:
        none: frozenset[Any] = frozenset()
        return SimpleNamespace(moves=self.moves, deaths=0, avoided=none, apart=none)

    def waits(self) -> bool:
        return self.prompt in self.first_node.prefill.waiting and self.prompt.times.admitted is None

    def make(self, ttft: float) -> Request:
        params = SamplingParams(max_tokens=self.arrival.output, temperature=0.0, ignore_eos=True)
        message = Generate(
            to="",
            sender="p",
            rid="r",
            room=self.room,
            token_ids=self.tokens.tobytes(),
            params=params,
            ttft=ttft,
            waited=self.simulation.clock.now - self.generation.created,
        )
        request = Request.from_message(message, b"p")
        request.state = RequestState.WAITING
        request.times.arrived = self.simulation.clock.now
        return request

    def output(self, count: int) -> None:
        now = self.simulation.clock.now
        if self.first_token is None:
            self.first_token, self.progress = now, 1
            self.simulation.prompt_over(self)
        self.count += count
        self.last_token = now

    @property
    def served(self) -> Served:
        assert self.first_token is not None
        more = self.count - 1
        tpot = (self.last_token - self.first_token) / more if more else 0.0
        return Served(self.arrival, self.first_token - self.generation.created, tpot)


class Simulation:
    def __init__(
        self,
        ttft: float | None,
        itl: float,
        *,
        roles: tuple[str, ...] = ("prefill", "decode"),
        pool_tokens: int = 180_000,
    ) -> None:
        self.clock, self.pool_tokens = Clock(), pool_tokens
        self.jobs: dict[bytes, Job] = {}
        self.done: list[Job] = []
        with mock.patch.object(time, "monotonic", self.clock.monotonic):
            self.nodes = [Node(self, role, f"n{i}", itl) for i, role in enumerate(roles)]
        self.by_handle = {node.handle: node for node in self.nodes}
        handles = [node.handle for node in self.nodes]
        self.router = Router(CacheAware(), handles, Predictor(ttft))
        attempts: Any = SimpleNamespace(get_attempt=self._current)
        metrics: Any = SimpleNamespace(
            moves=SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None))
        )
        self.moves = Moves("p", self.router, attempts, metrics, self._again)  # type: ignore[arg-type]

    def _current(self, room: bytes) -> Any:
        job = self.jobs.get(room)
        return None if job is None or job.is_over else job

    def run(self, load: Iterable[Arrival]) -> list[Served]:
        with mock.patch.object(time, "monotonic", self.clock.monotonic):
            begin = self.clock.now
            count = 0
            for arrival in load:
                self.clock.at(begin + arrival.at, lambda a=arrival, n=count: self._arrive(a, n))
                count += 1
            for number, node in enumerate(self.nodes):
                self.clock.at(begin + 0.2 * number + 0.1, lambda n=node: self._beat(n))
            self.clock.run(until=lambda: len(self.done) == count)
        return [job.served for job in self.done]

    def _beat(self, node: Node) -> None:
        node.report()
        self.moves.check_queue(node.handle)
        self.clock.at(self.clock.now + HEARTBEAT_INTERVAL, lambda: self._beat(node))

    def _arrive(self, arrival: Arrival, number: int) -> None:
        job = Job(self, arrival, number)
        self.jobs[job.room] = job
        self._place(job)

    def _again(self, job: Any) -> None:
        job.moves += 1
        self._place(job)

    def _place(self, job: Job) -> None:
        waited = self.clock.now - job.generation.created
        demand = Demand(Prompt(job.tokens, ""), 1, job.arrival.output, waited)
        route = self.router.choose_route("m", demand)
        job.predicted, job.sent_load = route.predicted, route.add_load(demand)
        first, second = route.first_node, route.decode_node or route.first_node
        job.first_node, job.decode_node = self.by_handle[first], self.by_handle[second]
        job.handles = (first, second)
        for handle in {first, second}:
            handle.active[job] = None
        job.prompt = job.make(route.predicted.objective)
        job.answer, job.expected_at = None, None
        if first is second:
            job.first_node.prefill.add_request(job.prompt)
            job.first_node.wake()
            return
        job.prompt.outgoing = SimpleNamespace()
        job.answer = job.make(0.0)
        job.answer.incoming = SimpleNamespace(num_bytes=0)
        job.decode_node.receiving.waiting.append(job)
        job.decode_node.pump()

    def prompt_over(self, job: Job) -> None:
        job.sent_load = job.sent_load.end_prompt()
        job.handles[0].active.pop(job, None) if job.first_node is not job.decode_node else None

    def hand_off(self, job: Job) -> None:
        """Continue the answer on the other node, after the prompt is prefilled."""
        first, decode = job.first_node, job.decode_node
        del decode.receiving.jobs[job.room]
        tokens = job.prompt.progress.first_tokens
        first.memory.release_pages(job.prompt.sequence)
        job.prompt.state = RequestState.DONE
        answer = job.answer
        assert answer is not None
        decode.memory.own_reserved(answer.sequence)
        answer.sequence.num_computed = job.arrival.prompt
        decode.memory.cache_tokens(answer.sequence)
        decode.scheduler.decode.add_request(answer, tokens, repeat=False)
        decode.wake()

    def withdraw(self, job: Job) -> None:
        """Take a request back from a node."""
        job.first_node.prefill.remove_request(job.prompt)
        job.prompt.state = RequestState.DONE
        if job.answer is not None:
            decode = job.decode_node
            decode.receiving.jobs.pop(job.room, None)
            answer = job.answer
            if len(answer.sequence.pages):
                decode.memory.own_reserved(answer.sequence)
                decode.memory.release_pages(answer.sequence)
        self._uncount(job)

    def _uncount(self, job: Job) -> None:
        for handle in job.handles:
            handle.active.pop(job, None)
        sent = job.sent_load.end_prompt()
        if sent.streams:
            job.handles[1].load.add_streams(-sent.streams, -sent.tokens)

    def finish(self, job: Job) -> None:
        if job.is_over:
            return
        job.is_over = True
        self._uncount(job)
        self.done.append(job)


def share_within(served: Iterable[Served], ttft: float, tpot: float) -> float:
    """Return the share of requests served within these seconds."""
    found = [each.ttft <= ttft and each.tpot <= tpot for each in served]
    return sum(found) / len(found)


def in_bursts(load: Iterable[Arrival], every: float) -> list[Arrival]:
    """Return the same load with arrivals at multiples of ``every`` seconds."""
    return [each._replace(at=each.at // every * every if every else each.at) for each in load]


def read_load(
    trace: Path, window: str, rate: float, bursts: float, most_output: int
) -> list[Arrival]:
    """Read a window of a trace, stretched to so many prompt tokens per second. Prompts larger than
    a pool are left out."""
    begin, end = (float(part) for part in window.split(":"))
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    chosen = [
        row
        for row in rows
        if begin <= row["timestamp"] / 1e3 < end and row["input_length"] < LONGEST_PROMPT
    ]
    scale = sum(row["input_length"] for row in chosen) / (end - begin) / rate
    load = [
        Arrival(
            scale * (row["timestamp"] / 1e3 - begin),
            row["input_length"],
            min(most_output, max(1, row["output_length"])),
        )
        for row in chosen
    ]
    return in_bursts(load, bursts)


def compare(load: list[Arrival], slos: Iterable[tuple[float, float]]) -> list[dict[str, Any]]:
    """Serve a load without objectives, and with each pair of them (milliseconds)."""
    usual = Simulation(None, 0.0).run(load)
    rows = []
    for ttft, itl in slos:
        limits = ttft / 1e3, itl / 1e3
        told = Simulation(*limits).run(load)
        rows.append(
            {
                "slo_ttft_ms": ttft,
                "slo_itl_ms": itl,
                "requests": len(load),
                "within_by_default": round(share_within(usual, *limits), 4),
                "within_told": round(share_within(told, *limits), 4),
                "longest_ttft_by_default_s": round(max(each.ttft for each in usual), 1),
                "longest_ttft_told_s": round(max(each.ttft for each in told), 1),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--windows", nargs="+", default=["900:912", "300:312"])
    parser.add_argument("--rates", nargs="+", type=float, default=[35e3, 50e3], help="tokens/s")
    parser.add_argument("--bursts", nargs="+", type=float, default=[0.0, 3.0])
    parser.add_argument("--slo", nargs="+", default=["1000:25", "500:25"], metavar="TTFT:ITL")
    parser.add_argument("--output-tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    slos = [(float(ttft), float(itl)) for ttft, itl in (each.split(":") for each in args.slo)]
    rows = []
    for window, rate, bursts in itertools.product(args.windows, args.rates, args.bursts):
        load = read_load(args.trace, window, rate, bursts, args.output_tokens)
        case = {"window": window, "prompt_tokens_per_s": rate, "bursts_s": bursts}
        for row in compare(load, slos):
            rows.append(case | row)
            print(json.dumps(rows[-1]), flush=True)
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/virtual_layouts.py", *sys.argv[1:]])
        write_report(args.output, command, rows, measured=["pd", "benchmarks/virtual_layouts.py"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
