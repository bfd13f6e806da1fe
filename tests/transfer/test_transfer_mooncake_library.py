"""Mooncake's transfer engine as it really behaves, and what is done about it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transfer_helpers import SEED, stop_process, wait_until

from pd.core.errors import SetupError
from pd.transfer.registry import check_backend
from pd.transfer.staged.mooncake.library import (
    ENGINES,
    EnginePool,
    MooncakeEngine,
    is_supported,
    load_library,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    load_library()
except SetupError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(error.message, allow_module_level=True)

HOST = "127.0.0.1"
SIZE = 64 << 20

# A process with an engine and memory, which does what it is told line by line.
_CHILD = """
import json, sys, time
import numpy as np
from pd.transfer.staged.mooncake.library import MooncakeEngine
memory = np.zeros(int(sys.argv[1]), np.uint8)
engine = MooncakeEngine("127.0.0.1")
engine.admit_only(("127.0.0.1",))
address = memory.ctypes.data
engine.register_memory(address, memory.size)
print(json.dumps([engine.name, address]), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Child:
    """A process that owns an engine; it may be stopped and killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name, self.address = self._answer()

    def ask(self, expression: str) -> Any:
        self.tell(expression)
        return self._answer()

    def tell(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        stop_process(self.process.pid)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def children() -> Iterator[Any]:
    made: list[Child] = []

    def make() -> Child:
        made.append(Child())
        return made[-1]

    yield make
    for child in made:
        child.kill()


@pytest.fixture
def engine() -> Iterator[MooncakeEngine]:
    taken = ENGINES.take_engine(HOST)
    yield taken
    ENGINES.give_back(HOST, taken)


def write(engine: MooncakeEngine, there: Child, source: int, target: int, size: int) -> bool:
    return engine.wait_for_write(engine.submit_write(there.name, source, target, size), pause=1e-3)


def reaches(port: int, source: str) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=0.5, source_address=(source, 0)):
            return True
    except TimeoutError:
        return False


def test_only_admitted_addresses_get_through_to_any_port(engine) -> None:
    ports = sorted(engine._ports)
    assert len(ports) == 2, "one for descriptions, one for data"
    assert not any(reaches(port, "127.0.0.1") for port in ports)
    engine.admit_only(("127.0.0.2",))
    assert all(reaches(port, "127.0.0.2") for port in ports)
    assert not any(reaches(port, "127.0.0.3") for port in ports)
    engine.admit_only(())
    assert not any(reaches(port, "127.0.0.2") for port in ports)


def test_a_connection_is_cut_when_its_address_is_no_longer_admitted(engine) -> None:
    engine.admit_only(("127.0.0.1",))
    data = max(engine._ports - {int(engine.name.rpartition(":")[2])})
    with socket.create_connection((HOST, data), timeout=5.0) as connection:
        wait_until(lambda: any(True for _ in engine._find_connections()), "the library to accept")
        assert engine.hang_up(5.0)
        assert connection.recv(1) == b""


def test_a_write_that_is_reported_has_arrived(engine, children) -> None:
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    there = children()
    source = np.frombuffer(rng.randbytes(8 << 20), np.uint8)
    engine.register_memory(source.ctypes.data, source.size)
    for _ in range(50):
        size = rng.randint(1, source.size)
        start, offset = rng.randint(0, source.size - size), rng.randint(0, SIZE - size)
        assert write(engine, there, source.ctypes.data + start, there.address + offset, size)
        ends = [int(source[start]), int(source[start + size - 1])]
        assert there.ask(f"memory[[{offset}, {offset + size - 1}]].tolist()") == ends
    engine.unregister_memory(source.ctypes.data)


def test_a_write_outside_registered_memory_fails_and_the_next_succeeds(engine, children) -> None:
    there = children()
    source = np.ones(1 << 20, np.uint8)
    address = source.ctypes.data
    beyond = there.address + SIZE - 4096
    assert not write(engine, there, address, beyond, 8192)
    assert write(engine, there, address, there.address, source.size)


def test_a_killed_peer_fails_a_write_at_once(engine, children) -> None:
    there = children()
    source = np.ones(SIZE, np.uint8)
    assert write(engine, there, source.ctypes.data, there.address, 1)
    there.stop()
    batch = engine.submit_write(there.name, source.ctypes.data, there.address, SIZE)
    time.sleep(0.2)
    assert engine.poll_write(batch) is None
    killed = time.monotonic()
    there.kill()
    assert not engine.wait_for_write(batch, pause=1e-3)
    assert time.monotonic() - killed < 1.0


@pytest.mark.parametrize("hang_up", [False, True])
def test_bytes_of_a_dead_writer_land_until_the_target_hangs_up(children, hang_up) -> None:
    """The hazard, without which the second half would prove nothing, and its end."""
    writer, target = children(), children()
    to_target = f"engine.submit_write({target.name!r}, address, {target.address}, "
    assert writer.ask(f"engine.wait_for_write({to_target} 1), 1e-3)")
    writer.ask("memory.fill(1)")
    target.ask("memory.fill(0)")
    target.stop()
    writer.ask(f"{to_target} {SIZE})")
    time.sleep(0.3)
    writer.kill()
    if hang_up:
        target.tell("[engine.unregister_memory(address), engine.hang_up(5.0)], memory.fill(7)")
    target.resume()
    if hang_up:
        assert target._answer()[0] == [None, True]
    time.sleep(0.5)
    landed = target.ask("int((memory == 1).sum())")
    assert landed == 0 if hang_up else landed > 0


def test_a_stopped_peer_holds_up_only_its_own_engine(engine, children) -> None:
    stopped, other = children(), children()
    source = np.ones(4096, np.uint8)
    stopped.stop()
    waiting = ENGINES.take_engine(HOST, stopped.name)
    arrived: list[bool] = []
    asking = threading.Thread(
        target=lambda: arrived.append(
            write(waiting, stopped, source.ctypes.data, stopped.address, source.size)
        )
    )
    asking.start()
    begun = time.monotonic()
    assert write(engine, other, source.ctypes.data, other.address, source.size)
    assert time.monotonic() - begun < 2.0, "Python's lock is not held either"
    assert not arrived
    stopped.resume()
    asking.join(timeout=20.0)
    assert arrived == [True]
    ENGINES.give_back(HOST, waiting)


def test_a_kernel_without_filters_is_refused_unless_the_ports_may_be_open(monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr("socket.socket.setsockopt", refuse)
    with pytest.raises(SetupError, match="refuses to filter who connects"):
        MooncakeEngine(HOST)
    monkeypatch.setenv("PD_MOONCAKE_OPEN_PORTS", "1")
    assert MooncakeEngine(HOST).name.startswith(HOST)


def test_an_engine_meets_each_name_once() -> None:
    pool = EnginePool()
    first = pool.take_engine(HOST, "somebody:1")
    pool.give_back(HOST, first)
    second = pool.take_engine(HOST, "somebody:1")
    assert second is not first
    pool.give_back(HOST, second)
    assert pool.take_engine(HOST, "somebody else:1") is first


def test_an_engine_that_met_many_is_destroyed() -> None:
    pool = EnginePool()
    pool.give_back(HOST, pool.take_engine(HOST, "somebody:0"))
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(1, 32):
        engine = pool.take_engine(HOST, f"somebody:{number}")
        pool.give_back(HOST, engine)
    assert len(engine.met) == 32
    assert len(os.listdir("/proc/self/fd")) < descriptors
    del engine
    fresh = pool.take_engine(HOST, "somebody:32")
    assert fresh.met == {"somebody:32"}
    pool.give_back(HOST, fresh)


def test_an_engine_that_is_not_in_use_costs_no_processor_time(engine) -> None:
    before = time.process_time()
    time.sleep(1.0)
    # A thread that polls takes all of this second. Other threads of the tests take some of it.
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("0.3.13", True),
        ("0.3.13.post1", True),
        ("0.4.0", True),
        ("0.3.12.post1", False),
        ("", False),
        ("soon", False),
    ],
)
def test_versions_that_report_too_early_are_known(version, good) -> None:
    assert is_supported(version) is good


def test_the_old_protocol_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(SetupError, match="MC_TCP_PROTO"):
        load_library()
    with pytest.raises(SetupError, match="--transfer-backend mooncake: MC_TCP_PROTO"):
        check_backend("mooncake")


def test_a_library_that_cannot_be_loaded_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(SetupError, match="libibverbs1 and librdmacm1"):
        check_backend("mooncake")


def test_the_check_imports_no_torch() -> None:
    code = (
        "import sys; from pd.transfer.registry import check_backend; check_backend('mooncake');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
