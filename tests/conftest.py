"""Fixtures shared by all tests."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import ssl
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import fields_of_routes
import pytest
import samples
import torch
import two_processes
from cpu_costs import CpuCosts
from forked_ranks import fork_ranks, stop_server
from hypothesis import HealthCheck, settings
from processes import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


# A shell that starts us in the background has us ignore Ctrl-C, and every process that a test
# starts would inherit that. Tests send it to such processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A starved machine draws slowly. Tests do not time.
settings.register_profile("pd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pd")

# Files of long tests, each of which makes the costly part of its fixtures for itself: workers of
# pytest-xdist share them test by test. Every other file stays on one worker, for its fixtures.
SHARED_BY_WORKERS = (
    "tests/assets/test_embedded_model.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_load.py",
    "tests/e2e/test_recall.py",
    "tests/e2e/test_ucx_tcp.py",
    "tests/security/test_one_client.py",
    "tests/transfer/test_transfer_late_writes.py",
    "tests/transfer/test_transfer_nixl.py",
)

# Files of long tests whose costly fixture has a parameter: those with the same value of it, the
# first of their parameters, stay on one worker.
SHARED_BY_FIXTURE = ("tests/e2e/test_failover.py",)

# Folders whose files share costly fixtures of the session, so all of them stay on one worker.
SHARED_BY_FOLDER = ("tests/offline",)

# Tests that take minutes, which would be the last to end.
BEGIN_FIRST = (
    "tests/proxy/dispatch/test_proxy_soak.py",
    "tests/e2e/test_churn.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_failover.py",
    "tests/e2e/test_failover_processes.py",
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_ucx_tcp.py",
    "tests/transfer/test_transfer_late_writes.py",
    "tests/transfer/test_transfer_nixl.py",
    "tests/grammar/test_hostile_grammars.py",
    "tests/speculative/test_many_streams.py",
    "tests/speculative/test_pairs.py",
    "tests/grammar/test_random_schemas.py",
    "tests/grammar/test_tool_calls.py",
    "tests/grammar/test_token_characters.py",
    "tests/e2e/test_recall.py",
    "tests/e2e/test_load.py",
    "tests/e2e/test_damage_rate.py",
    "tests/e2e/test_elastic_processes.py",
    "tests/proxy/workers/test_with_uvloop.py",
    "tests/assets/test_embedded_model.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but for :data:`SHARED_BY_WORKERS`, :data:`SHARED_BY_FIXTURE` and
    :data:`SHARED_BY_FOLDER`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _together(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _together(nodeid: str) -> str:
    """Name the group of tests that stay on one worker with this one."""
    file = nodeid.partition("::")[0]
    if file in SHARED_BY_FIXTURE:
        return nodeid.partition("-")[0]
    folder = file.rpartition("/")[0]
    if folder in SHARED_BY_FOLDER:
        return folder
    return nodeid if file in SHARED_BY_WORKERS else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run :data:`BEGIN_FIRST` first, then files of many tests, and single tests last, so that
    several workers end at about the same time."""
    every: int = config.option.every
    if every > 1:
        config.hook.pytest_deselected(items=[i for n, i in enumerate(items) if n % every])
        items[:] = items[::every]
    if not hasattr(config, "workerinput"):
        return
    counts = Counter(_together(item.nodeid) for item in items)

    def place(item: pytest.Item) -> tuple[bool, int]:
        is_first = item.nodeid.startswith(BEGIN_FIRST)
        return not is_first, -counts[_together(item.nodeid)]

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-costs",
        type=int,
        metavar="N",
        help="name the N files and the N tests that took most processor time",
    )

    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="run one of N tests, in their order"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Proxies of this process run on asyncio's loop, those that are processes on uvloop, so that
    # tests see both. tests/proxy/workers/test_with_uvloop.py turns it round for some files.
    if os.environ.get("PD_TEST_LOOP") != "uvloop":
        sys.modules["uvloop"] = None  # type: ignore[assignment]
    # What a forked process inherits of a GPU's libraries does not work there.
    Process.forks = not torch.cuda.is_available()
    config.pluginmanager.register(samples)
    if two_processes.PROCESSES > 1:
        config.pluginmanager.register(two_processes)
    if config.option.cpu_costs is not None:
        config.pluginmanager.register(CpuCosts(config.option.cpu_costs))


@pytest.fixture(scope="session")
def seed() -> int:
    """Seed everything random in a test run: PD_TEST_SEED, or a new seed that is printed."""
    chosen = int(os.environ.get("PD_TEST_SEED") or random.SystemRandom().randrange(1 << 31))
    print(f"\nPD_TEST_SEED={chosen}")
    return chosen


@pytest.fixture(scope="module", autouse=True)
def modules_are_no_garbage() -> None:
    """Exempt imported modules from garbage collection, because searching their million objects
    takes a quarter of a second each time."""
    if len(gc.get_objects(generation=2)) > 50_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def two_tcp_connections() -> None:
    """Open two connections per link, as on machines with more than two cores."""
    from pd.transfer.tcp.manager import TcpManager

    TcpManager.__init__.__kwdefaults__["connections"] = 2


@pytest.fixture(scope="session", autouse=True)
def one_list_of_certificates() -> Iterator[None]:
    """Share the certificates of all authorities among httpx's clients, because reading them takes
    20 times as much processor time as a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_field_of_each_answer() -> Iterator[None]:
    """See ``fields_of_routes.py``."""
    with pytest.MonkeyPatch.context() as patch:
        fields_of_routes.make_once(patch)
        yield


@pytest.fixture(autouse=True)
def settings_of_libraries_stay_here() -> Iterator[None]:
    """Restore variables that backends set for their libraries, so that later processes do not
    inherit them."""
    before = os.environ.copy()
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]


@pytest.fixture(scope="session")
def rank_server() -> Iterator[None]:
    """Share the process that workers are forked from among all files."""
    yield
    stop_server()


@pytest.fixture(scope="module")
def forked_ranks(rank_server: None) -> Iterator[None]:
    """Start workers of nodes with two ranks quickly."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        yield


@pytest.fixture
def unstarved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit progress as on an idle machine, whatever else runs on this one."""
    from pd.util.starvation import RUN_DELAY

    monkeypatch.setattr(RUN_DELAY, "measure_growth", lambda since: 0.0)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the directory of an architecture's tiny random checkpoint, once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        from checkpoints import make_checkpoint

        if architecture not in made:
            directory = tmp_path_factory.mktemp("checkpoints") / architecture
            made[architecture] = make_checkpoint(architecture, directory)
        return made[architecture]

    return make
