"""Several processes behind one port (``--workers``) are one proxy to clients."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_node import wait_until
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from proxy_cluster import Cluster, read_events

from pd.core.errors import SetupError, UsageError
from pd.core.messages import Finish
from pd.proxy.config import ProxyConfig
from pd.proxy.dispatch.dispatcher import ABORTED
from pd.proxy.workers.actions import AbortAll, AddWorker, Outcome, RemoveWorker
from pd.proxy.workers.claims import Claims
from pd.proxy.workers.ledger import Ledger
from pd.proxy.workers.metric_families import (
    collect_registry,
    drop_gauges,
    merge_families,
    render_families,
)
from pd.proxy.workers.parent import ProxyProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fake_node import FakeNode

    from pd.core.messages import Generate
    from pd.proxy.server import ProxyThread
    from pd.proxy.workers.actions import Action

pytestmark = pytest.mark.one_process("starts several processes by itself")
WAIT = 120.0


class Processes:
    """A node that answers what the test says, and a proxy of two processes in front of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.node: FakeNode = cluster.node("unified", auto=False)
        self.proxy: ProxyThread = cluster.proxy(workers=2, max_queue=8)
        self.url = self.proxy.url
        self._pool = ThreadPoolExecutor(16)

    @property
    def parent(self) -> Any:
        return self.proxy.proxy

    def request(self, **asked: Any) -> tuple[Any, Generate]:
        """Send a request on a connection of its own, and wait until the node has its prompts;
        returns the future answer and the last prompt."""
        count = len(self.node.generates)
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 50}} | asked
        answer = self._pool.submit(httpx.post, f"{self.url}/generate", json=body, timeout=WAIT)
        prompts = len(body["input_ids"]) if body["input_ids"] != [5] else 1
        return answer, self.node.wait_generate(count + prompts)

    def one_in_each(self, **asked: Any) -> list[tuple[Any, Generate]]:
        """A request in each process, by its number."""
        acceptor = self.parent._acceptor
        wait_until(lambda: not any(map(acceptor.count_open, self.parent.children)), WAIT)
        by_sender: dict[str, tuple[Any, Generate]] = {}
        while len(by_sender) < 2:
            answer, generate = self.request(**asked)
            assert generate.sender not in by_sender, "connections do not alternate"
            by_sender[generate.sender] = answer, generate
        return [by_sender[child.instance_id] for child in self.parent.children]

    def finish(self, generate: Generate) -> None:
        self.node.say(generate, [40, 41], finish=Finish("length"))

    def get(self, path: str) -> httpx.Response:
        """Ask on a connection of its own."""
        return httpx.get(self.url + path, timeout=WAIT)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT)

    def metric(self, line: str) -> float:
        found = [row for row in self.get("/metrics").text.splitlines() if row.startswith(line)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


@pytest.fixture(scope="module")
def two(model_dir: str) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(Cluster(stack, model_dir))


def test_a_rid_is_in_use_in_all_processes_and_aborted_from_any(two: Processes) -> None:
    answer, generate = two.request(rid="mine")
    for _ in range(4):  # of which half are connections to the other process
        refused = two.post("/generate", input_ids=[5], rid="mine")
        assert refused.status_code == 400
        assert "in use" in refused.json()["error"]["message"]
    batch = two.post("/generate", input_ids=[[5], [6]], rid=["other", "mine"])
    assert batch.status_code == 400
    aborted = [two.post("/abort_request", rid="mine") for _ in range(2)]
    assert [a.status_code for a in aborted] == [200, 404]
    assert answer.result(WAIT).json()["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": ABORTED,
    }
    assert two.node.wait_abort(generate.room)
    # The name is free again, in every process.
    for _ in range(2):
        answer, generate = two.request(rid="mine")
        two.finish(generate)
        assert answer.result(WAIT).status_code == 200


def test_all_requests_of_all_processes_are_aborted(two: Processes) -> None:
    answers = [answer for answer, _ in two.one_in_each()]
    assert two.post("/abort_request", abort_all=True).json() == {"aborted": 2}
    for answer in answers:
        assert answer.result(WAIT).json()["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": ABORTED,
        }


def test_the_queue_is_that_of_all_processes(two: Processes) -> None:
    running = two.one_in_each(input_ids=[[5]] * 4)
    for _ in range(3):
        refused = two.post("/generate", input_ids=[5])
        assert refused.status_code == 429
        assert "8 requests times `n` are in the system" in refused.json()["error"]["message"]
    two.post("/abort_request", abort_all=True)
    for answer, _ in running:
        assert answer.result(WAIT).status_code == 200
    answer, _ = two.request(input_ids=[[5]] * 8)
    two.post("/abort_request", abort_all=True)
    assert answer.result(WAIT).status_code == 200


def test_metrics_are_those_of_all_processes(two: Processes) -> None:
    line = "pd_proxy_output_tokens_total "
    before = two.metric(line)
    running = two.one_in_each()
    for _ in range(3):
        assert two.metric("pd_proxy_running_requests ") == 2
    for answer, generate in running:
        two.finish(generate)
        assert answer.result(WAIT).status_code == 200
    for _ in range(3):
        assert two.metric(line) >= before + 4
    assert two.metric("pd_proxy_worker_up{") == 1


def test_nodes_join_and_leave_all_processes(two: Processes, model_dir: str) -> None:
    with ExitStack() as stack:
        node = Cluster(stack, model_dir).node("unified")
        entry = two.post("/workers", role="unified", url=node.url).json()
        assert (entry["role"], entry["url"]) == ("unified", node.url)
        # Two heartbeats' threads and two event loops talk to it: each process is a proxy to it.
        wait_until(lambda: len(node.heartbeats) == 4, WAIT)
        listed = [two.get("/workers").json()["workers"] for _ in range(4)]
        assert [[w["url"] for w in workers] for workers in listed] == [[two.node.url, node.url]] * 4
        removed = httpx.delete(f"{two.url}/workers/{node.instance_id}", timeout=WAIT)
        assert removed.json()["draining"]
        for _ in range(4):
            assert [w["url"] for w in two.get("/workers").json()["workers"]] == [two.node.url]
        wrong = two.post("/workers", role="oracle", url=node.url)
        assert wrong.status_code == 400
        assert "oracle" in wrong.text


def test_a_process_that_dies_fails_its_own_requests_and_is_replaced(
    two: Processes, model_dir: str
) -> None:
    with ExitStack() as stack:
        later = Cluster(stack, model_dir).node("decode")
        two.post("/workers", role="decode", url=later.url)
        total = "pd_proxy_requests_total{"
        streams = two.one_in_each(rid=None, stream=True, incremental=True)
        (dying, _), (living, generate) = streams
        tokens = two.metric("pd_proxy_output_tokens_total ")
        for _, each in streams:
            two.node.say(each, [40])
        wait_until(lambda: two.metric("pd_proxy_output_tokens_total ") == tokens + 2, WAIT)
        before = two.metric(total)
        victim = two.parent.children[0]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            dying.result(WAIT)
        two.node.say(generate, [41], position=1, finish=Finish("length"))
        events = read_events(living.result(WAIT))
        assert [token for event in events[:-1] for token in event["output_ids"]] == [40, 41]
        assert events[-1] == "DONE"
        assert two.metric(total) >= before

        def replaced() -> bool:
            child = two.parent.children[0]
            return child is not None and child is not victim and child.serves

        wait_until(replaced, WAIT)
        # The successor knows the node that joined while its predecessor lived.
        wait_until(lambda: two.parent.children[0].instance_id in later.heartbeats, WAIT)
        for answer, generate in two.one_in_each():
            two.finish(generate)
            assert answer.result(WAIT).status_code == 200
        httpx.delete(f"{two.url}/workers/{later.instance_id}", timeout=WAIT)


def test_connections_that_a_process_had_not_taken_when_it_died_are_answered_by_another(
    two: Processes,
) -> None:
    """It stood still when it was given them, so it has read nothing of their requests."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for answer, generate in two.one_in_each():  # all that came before has ended
        two.finish(generate)
        assert answer.result(WAIT).status_code == 200
    number = chance.randrange(2)
    victim, living = two.parent.children[number], two.parent.children[1 - number]
    os.kill(victim.pid, signal.SIGSTOP)
    asked, seen = chance.randrange(4, 9), len(two.node.generates)
    handed = victim.connections.count + living.connections.count
    answers = [
        two._pool.submit(
            httpx.post,
            f"{two.url}/generate",
            json={"input_ids": [5], "sampling_params": {"max_new_tokens": 50}},
            timeout=WAIT,
        )
        for _ in range(asked)
    ]
    wait_until(lambda: victim.connections.count + living.connections.count == handed + asked, WAIT)
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: len(two.node.generates) == seen + asked, WAIT)
    for generate in two.node.generates[seen:]:
        two.finish(generate)
    assert [answer.result(WAIT).status_code for answer in answers] == [200] * asked

    def replaced() -> bool:
        child = two.parent.children[number]
        return child is not None and child is not victim and child.serves

    wait_until(replaced, WAIT)


def test_a_process_that_stands_still_gets_no_connections_until_it_goes_on(
    two: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.workers.acceptor.STUCK_SECONDS", 0.5)
    acceptor, stopped = two.parent._acceptor, two.parent.children[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: acceptor.is_stuck(stopped), WAIT)
        for _ in range(6):
            answer, generate = two.request()
            assert generate.sender == two.parent.children[1].instance_id
            two.finish(generate)
            assert answer.result(WAIT).status_code == 200
        # Neither do the metrics wait for it, nor what all are told.
        assert two.metric("pd_proxy_worker_up{") == 1
        assert two.post("/abort_request", abort_all=True).status_code == 200
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    wait_until(lambda: not acceptor.is_stuck(stopped), WAIT)
    for answer, generate in two.one_in_each():
        two.finish(generate)
        assert answer.result(WAIT).status_code == 200


def test_a_process_that_hangs_is_ended_and_replaced(
    two: Processes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its streams break off, its place in the queue is free, and connections that it was given
    and had not taken are answered by another process."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    number = random.Random(seed).randrange(2)
    streams = two.one_in_each(input_ids=[[5]] * 4)
    (dying, _), (living, _) = streams[number], streams[1 - number]
    hung = two.parent.children[number]
    # However long this thread gets no CPU, the process is given a connection before it is ended.
    monkeypatch.setattr("pd.proxy.workers.acceptor.STUCK_SECONDS", float("inf"))
    os.kill(hung.pid, signal.SIGSTOP)
    given = hung.connections.count
    asked = []
    while hung.connections.count == given:
        asked.append(two._pool.submit(two.get, "/workers"))
        time.sleep(0.05)
    monkeypatch.setattr("pd.proxy.workers.hangs.HANG_SECONDS", 3.0)
    with pytest.raises(httpx.HTTPError):
        dying.result(WAIT)
    assert [answer.result(WAIT).status_code for answer in asked] == [200] * len(asked)
    assert f"proxy process {number} (pid {hung.pid}) hangs" in caplog.text

    def replaced() -> bool:
        child = two.parent.children[number]
        return child is not None and child is not hung and child.serves

    wait_until(replaced, WAIT)
    # The queue has room for as many prompts as the ended process had.
    answer, _ = two.request(input_ids=[[5]] * 4)
    assert two.post("/generate", input_ids=[5]).status_code == 429
    two.post("/abort_request", abort_all=True)
    assert [each.result(WAIT).status_code for each in (answer, living)] == [200, 200]


def test_a_parent_that_stood_still_together_with_its_children_ends_none(
    two: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on before they do."""
    monkeypatch.setattr("pd.proxy.workers.hangs.HANG_SECONDS", 3.0)
    children, went_on = list(two.parent.children), threading.Event()
    time.sleep(1.0)  # the watch looks as often as the patched limit says

    def stand_still() -> None:
        time.sleep(4.0)
        went_on.set()

    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.3)  # some looks find them so
    two.proxy._loop.call_soon_threadsafe(stand_still)
    assert went_on.wait(WAIT)
    time.sleep(0.2)
    for child in children:
        os.kill(child.pid, signal.SIGCONT)
    for answer, generate in two.one_in_each():
        two.finish(generate)
        assert answer.result(WAIT).status_code == 200
    assert two.parent.children == children


def test_a_process_that_cannot_be_started_is_tried_again(
    two: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, calls = subprocess.Popen, itertools.count()

    def few(*args: Any, **options: Any) -> Any:
        if next(calls) < 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*args, **options)

    monkeypatch.setattr("pd.proxy.workers.process.subprocess.Popen", few)
    open_files, victim = len(os.listdir("/proc/self/fd")), two.parent.children[1]
    os.kill(victim.pid, signal.SIGKILL)

    def replaced() -> bool:
        child = two.parent.children[1]
        return child is not None and child is not victim and child.serves

    wait_until(replaced, WAIT)
    assert next(calls) == 3
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= open_files, WAIT)


def test_a_proxy_without_room_for_processes_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("pd.proxy.workers.process.subprocess.Popen", none)
    with pytest.raises(SetupError, match=r"cannot be started \(Too many open files\)"):
        cluster.proxy(workers=2)


def test_processes_need_neither_a_disk_nor_the_working_directory(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that writes to a mapped file for which the disk has no room is ended by SIGBUS. The
    working directory may hold an older clone of pd."""
    (tmp_path / "pd").mkdir()
    (tmp_path / "pd" / "__init__.py").write_text("raise SystemExit('this is another pd')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert httpx.get(f"{cluster.proxy(workers=2).url}/health").status_code == 200


class Told:
    """A child of a parent without processes: it is told actions, and answers when it may.

    Attributes:
        begun: it had its first message, so that it can be told more.
    """

    def __init__(self, number: int, *, answers: bool = True, begun: bool = True) -> None:
        self.number, self.answers, self.begun = number, answers, begun
        self.serves, self.told = begun, list[Any]()
        self.families: list[Any] = []
        self.seconds = 0.01

    async def perform_action(self, action: Action, seconds: float) -> Outcome | None:
        self.told.append(action)
        await asyncio.sleep(self.seconds)
        return Outcome({"url": "http://n", "role": "decode"}) if self.answers else None

    def perform_later(self, action: Action) -> bool:
        if self.begun:
            self.told.append(action)
        return self.begun


def perform(children: list[Any], action: Action, meanwhile: Any = None) -> list[Outcome]:
    """What the first child is replied when it asks for an action."""

    async def run() -> list[Outcome]:
        parent: Any = ProxyProcesses(ProxyConfig(workers=len(children)))
        parent.children = children
        parent._acceptor = SimpleNamespace(is_stuck=lambda child: False)
        replies: list[Any] = []
        asked = asyncio.create_task(parent._perform_action(children[0], action, replies.append))
        await asyncio.sleep(0)
        if meanwhile is not None:
            parent.children = meanwhile(children)
        await asked
        (reply,) = replies
        is_noted = "http://n" in parent._config.decode
        assert is_noted == (isinstance(action, AddWorker) and reply[0].error is None)
        return reply

    return asyncio.run(run())


def test_a_process_too_busy_to_answer_is_replied_what_the_others_say() -> None:
    action = AddWorker("decode", "http://n")
    children = [Told(0, answers=False), Told(1)]
    (outcome,) = perform(children, action)
    assert outcome.error is None
    assert [child.told for child in children] == [[action]] * 2
    (outcome,) = perform([Told(0, answers=False), Told(1, answers=False)], action)
    assert outcome.error is not None and "no process of the proxy answered" in outcome.error.message


def test_processes_that_start_meanwhile_are_told() -> None:
    """They began with the nodes that the parent knew before."""
    action = AddWorker("decode", "http://n")
    early, late = Told(1, begun=False), Told(2)

    def started(children: list[Told]) -> list[Told]:
        early.begun = True
        return [*children, late]

    perform([Told(0), early], action, started)
    assert early.told == late.told == [action]


def test_requests_of_processes_that_start_meanwhile_are_not_aborted() -> None:
    late = Told(1)
    perform([Told(0)], AbortAll(), lambda children: [*children, late])
    assert late.told == []


def test_changes_are_noted_in_the_order_in_which_they_were_asked_for() -> None:
    """Though the process that delays the first one is not waited for any more by the second."""

    async def run() -> ProxyConfig:
        slow, quick = Told(0), Told(1)
        parent: Any = ProxyProcesses(ProxyConfig(workers=2))
        parent.children = [slow, quick]
        stuck: list[Any] = []
        parent._acceptor = SimpleNamespace(is_stuck=lambda child: child in stuck)
        slow.seconds = 0.2
        add, remove = AddWorker("decode", "http://n"), RemoveWorker("http://n")
        first = asyncio.create_task(parent._perform_action(quick, add, lambda reply: None))
        await asyncio.sleep(0.05)
        stuck.append(slow)
        await asyncio.gather(first, parent._perform_action(quick, remove, lambda reply: None))
        assert slow.told == quick.told == [add, remove]
        return parent._config

    assert asyncio.run(run()).decode == []


def test_a_node_that_changed_its_role_is_known_by_the_one_with_which_it_was_added(
    two: Processes, model_dir: str
) -> None:
    """To a process that was started later, too, when the node is started again as it was."""
    with ExitStack() as stack:
        node = Cluster(stack, model_dir).node("decode", elastic=True)
        two.post("/workers", role="decode", url=node.url)
        name = node.url.removeprefix("http://")
        wait_until(lambda: two.post(f"/workers/{name}", role="prefill").status_code == 200, WAIT)
        victim = two.parent.children[0]
        os.kill(victim.pid, signal.SIGKILL)
        node.kill()
        node.overrides["elastic"] = False
        node.start()

        def states() -> list[tuple[str, bool]]:
            listed = [two.get("/workers").json()["workers"] for _ in range(4)]
            return [
                (w["role"], w["ready"]) for found in listed for w in found if w["url"] == node.url
            ]

        def replaced() -> bool:
            child = two.parent.children[0]
            return child is not None and child is not victim and child.serves

        wait_until(replaced, WAIT)
        wait_until(lambda: states() == [("decode", True)] * 4, WAIT)
        httpx.delete(f"{two.url}/workers/{node.instance_id}", timeout=WAIT)


@pytest.mark.full
def test_what_a_process_cannot_start_with_ends_all_with_one_error(cluster: Cluster) -> None:
    (port := socket.socket()).bind(("127.0.0.1", 0))
    with port, pytest.raises(UsageError, match="no tokenizer"):
        empty = f"{cluster.model_dir}/empty"
        os.makedirs(empty, exist_ok=True)
        cluster.proxy(workers=2, tokenizer=empty)


@pytest.mark.full
def test_processes_that_end_before_they_serve_end_the_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd.proxy.workers.process._MODULE", "pd.proxy.workers.nowhere")
    with pytest.raises(SetupError, match="status 1 before it served"):
        cluster.proxy(workers=2)


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_a_number_of_processes_that_makes_no_sense(workers: int) -> None:
    with pytest.raises(UsageError, match=f"--workers .* not {workers}"):
        ProxyConfig(workers=workers).validate()


# ---- the parts


def registry(requests: int, up: int) -> CollectorRegistry:
    """Metrics of one process."""
    made = CollectorRegistry()
    Counter("requests", "how many", ["path"], registry=made).labels('a "b"\n').inc(requests)
    Gauge("running", "now", registry=made).set(requests)
    Gauge("node_up", "usable", ["url"], registry=made).labels("n").set(up)
    latency = Histogram("latency", "seconds", buckets=(0.1, 1), registry=made)
    for _ in range(requests):
        latency.observe(0.5)
    return made


def test_metrics_of_one_process_are_written_as_the_library_does() -> None:
    made = registry(3, 1)
    assert render_families(collect_registry(made)) == generate_latest(made)
    assert render_families(merge_families([collect_registry(made)])) == generate_latest(made)


def test_metrics_of_several_are_added_up_and_a_node_is_up_if_it_is_for_all() -> None:
    text = render_families(
        merge_families(collect_registry(registry(n, up)) for n, up in ((3, 1), (4, 0)))
    ).decode()
    lines = text.splitlines()
    assert 'requests_total{path="a \\"b\\"\\n"} 7.0' in lines
    assert "running 7.0" in lines
    assert 'node_up{url="n"} 0.0' in lines
    assert 'latency_bucket{le="1.0"} 7.0' in lines
    assert "latency_sum 3.5" in lines


def test_an_ended_process_leaves_what_it_counted_and_no_state() -> None:
    left = {family.name for family in drop_gauges(collect_registry(registry(3, 1)))}
    assert left == {"requests", "latency"}


def test_a_ledger_adds_up_rows_and_forgets_one() -> None:
    memory = memoryview(bytearray(Ledger.get_size(3)))
    rows = [Ledger(memory, row) for row in range(3)]
    for number, ledger in enumerate(rows):
        ledger.add_counts(number + 1, 100, 10)
        ledger.note_taken(number + 2)
        ledger.note_turn(closed=number)
    counts = {(ledger.prompts, ledger.tokens, ledger.logprobs) for ledger in rows}
    assert counts == {(6, 300, 30)}
    assert [rows[0].get_taken(number) for number in range(3)] == [2, 3, 4]
    rows[0].clear_row(2)
    assert [rows[0].get_taken(number) for number in range(3)] == [2, 3, 0]
    assert (rows[1].prompts, rows[1].tokens, rows[0].get_closed(1), rows[0].get_closed(2)) == (
        3,
        200,
        1,
        0,
    )
    assert rows[0].is_shared
    assert not Ledger().is_shared


def test_claims_are_of_one_process_and_owner() -> None:
    claims: Any = Claims()
    assert claims.claim_rids("first", "anna", ["a", "b"]) is None
    assert claims.claim_rids("second", "anna", ["c", "b"]) == "b"
    assert claims.claim_rids("second", "bert", ["b"]) is None
    assert claims.claim_rids("second", "anna", ["c"]) is None  # the refused claim took nothing
    # A process refuses a second request of a name by itself, and the first one keeps it.
    assert claims.claim_rids("first", "anna", ["a"]) is None
    claims.release_rids("first", "anna", ["a"])
    assert claims.claim_rids("second", "anna", ["a"]) == "a"
    claims.release_rids("second", "anna", ["a"])
    assert claims.claim_rids("second", "anna", ["a"]) == "a"
    claims.drop_child("first")
    assert claims.claim_rids("second", "anna", ["a", "b"]) is None
