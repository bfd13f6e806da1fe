"""A transfer backend in a package of its own, installed beside pd and found by its entry point."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference_generate
from forked_commands import ForkedCommand
from processes import Process, deployment
from transfer_helpers import make_pool

from pd.core.errors import SetupError, UsageError
from pd.embedded import EMBEDDED_MODEL
from pd.transfer.outside import find_outside
from pd.transfer.registry import backend_names, find_backend, make_transfer_manager
from pd.transfer.tcp.backend import TcpBackend
from pd.transfer.tcp.manager import TcpManager

PACKAGE = Path(__file__).parent / "mailbox_package"
PROGRAM = Path(__file__).parent / "outside_program.py"
USAGE, ENVIRONMENT = 2, 1


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH in which pip installed the package."""
    root = tmp_path_factory.mktemp("outside")
    source, target = root / "source", root / "installed"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *flags, str(source)], check=True, capture_output=True, timeout=120)
    return target


def write_package(root: Path, name: str, entry_points: str, module: str = "") -> None:
    """What an installer would leave of a package with one module, ``NAME_module``."""
    information = root / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[pd.transfer]\n{entry_points}\n", encoding="utf-8"
    )
    (root / f"{name}_module.py").write_text(textwrap.dedent(module))


def search_path(*directories: Path) -> str:
    """A PYTHONPATH with these directories before those of this process."""
    before = [str(directory) for directory in directories]
    return os.pathsep.join(filter(None, [*before, os.environ.get("PYTHONPATH", "")]))


def launch(
    directories: list[Path], command: str, program: str = "pd.cli"
) -> subprocess.CompletedProcess[str]:
    """Run ``pd-launch`` where packages in these directories are installed."""
    env = os.environ | {"PYTHONPATH": search_path(*directories), "COLUMNS": "200"}
    if Process.forks and program == "pd.cli":
        with tempfile.TemporaryFile("w+") as log:
            arguments: dict[str, Any] = {"env": env, "namespace": None, "log": log.fileno()}
            child = ForkedCommand(str(PROGRAM), command.split(), **arguments)
            with child.stdout:
                output = child.stdout.read()
            status = child.wait(120)
            log.seek(0)
            return subprocess.CompletedProcess(command, status, output, log.read())
    return subprocess.run(
        [sys.executable, "-m", program, *command.split()],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
    )


def decode(backend: str, flags: str = "--device cpu") -> str:
    return f"decode --model {EMBEDDED_MODEL} --port 0 {flags} --transfer-backend {backend}"


def test_serves_the_reference_tokens_through_an_outside_backend(
    installed: Path, tmp_path: Path
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(2000) for _ in range(n)] for n in (1, 16, 33, 200, 700)]
    flags = ["--transfer-backend", "mailbox", "--device", "cpu", "--kv-digest"]
    flags += ["--chunked-prefill-size", "256"]
    with deployment(
        EMBEDDED_MODEL,
        tmp_path,
        node_flags=flags,
        decode_flags=["--page-size", "32"],
        env={"PYTHONPATH": search_path(installed)},
    ) as running:
        streams = [running.stream(prompt, 12) for prompt in prompts]
        outputs = [stream.join().output for stream in streams]
        assert outputs == reference_generate(EMBEDDED_MODEL, prompts, 12)
        running.wait_idle()
        (peer,) = running.decode[0].server_info()["peers"]
        assert peer["transfer_backend"] == "mailbox"


@pytest.mark.full
def test_the_benchmark_moves_bytes_through_an_outside_backend(installed: Path) -> None:
    flags = "transfer --backend mailbox --model embedded --tokens 256 --repeats 1 --seconds 0"
    measured = launch([installed], flags, "pd.bench")
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.splitlines()[-1].startswith("mailbox")


def test_help_and_errors_name_an_outside_backend(installed: Path) -> None:
    assert "nvlink, fake, mailbox;" in launch([installed], "decode --help").stdout
    wrong = launch([installed], decode("malibox"))
    assert wrong.returncode == USAGE
    assert "'mailbox'" in wrong.stderr


def test_an_outside_backend_says_itself_what_it_needs(installed: Path) -> None:
    refused = launch([installed], decode("mailbox", "--device cuda"))
    assert refused.returncode == ENVIRONMENT
    assert "--transfer-backend mailbox: it reads and writes host memory only" in refused.stderr
    refused = launch([installed], decode("mailbox", "--device cpu --tp-size 2"))
    assert refused.returncode == USAGE
    assert "mailbox moves the KV of one device" in refused.stderr


BROKEN = {
    "no such module": ("broken = missing_module:Backend", "", "ModuleNotFoundError"),
    "no such class": ("broken = broken_module:Backend", "", "AttributeError"),
    "a module that does not compile": ("broken = broken_module:Backend", "class (", "SyntaxError"),
    "a module that ends the process": (
        "broken = broken_module:Backend",
        "import sys; sys.exit('no licence')",
        "SystemExit: no licence",
    ),
    "no backend": ("broken = broken_module:Backend", "Backend = dict", "no subclass of Transfer"),
    "a hook that fails": (
        "broken = broken_module:Backend",
        """
        from pd.transfer.backend import TransferBackend

        class Backend(TransferBackend):
            def obstacle(self, device):
                return 1 / 0

            def manager_class(self):
                raise ImportError
        """,
        "ZeroDivisionError",
    ),
    "an abstract class": (
        "broken = broken_module:Backend",
        """
        from pd.transfer.backend import TransferBackend

        class Backend(TransferBackend):
            pass
        """,
        "TypeError",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_fails_with_its_name_and_hinders_no_other(
    case: str, installed: Path, tmp_path: Path
) -> None:
    entry_point, module, cause = BROKEN[case]
    write_package(tmp_path, "broken", entry_point, module)
    ended = launch([tmp_path, installed], decode("broken"))
    assert ended.returncode == ENVIRONMENT
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "transfer backend broken of package broken is broken" in ended.stderr
    assert cause in ended.stderr
    if case not in ("no such module", "a module that ends the process"):
        return
    # The outside package that works gets as far as its own refusal.
    other = launch([tmp_path, installed], decode("mailbox", "--device cuda"))
    assert "host memory only" in other.stderr


def test_entry_points_that_cannot_be_read_are_passed_over(installed: Path, tmp_path: Path) -> None:
    write_package(tmp_path, "garbled", "no equals sign")
    ended = launch([tmp_path, installed], decode("mailbox", "--device cuda"))
    assert "host memory only" in ended.stderr
    assert "the entry points of garbled cannot be read" in ended.stderr


@pytest.mark.parametrize("name", ["tcp", "auto"])
def test_a_package_cannot_replace_a_built_in_backend(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_package(tmp_path, "impostor", f"{name} = impostor_module:Backend", "raise ValueError")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(find_backend("tcp"), TcpBackend)
    with caplog.at_level(logging.WARNING):
        manager = make_transfer_manager("tcp", make_pool(16, 4), "X")
    manager.close()
    assert isinstance(manager, TcpManager)
    assert f"the transfer backend '{name}' of impostor is ignored" in caplog.text
    listed = "auto, tcp, nixl, mooncake, nvlink, fake;"
    assert listed in launch([tmp_path], "decode --help").stdout


def test_two_packages_of_one_name_are_refused_only_when_it_is_chosen(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        write_package(tmp_path, name, f"twice = {name}_module:Backend")
    ended = launch([tmp_path, installed], decode("twice"))
    assert ended.returncode == USAGE
    assert "offered by" in ended.stderr and "one" in ended.stderr and "two" in ended.stderr
    assert "host memory" in launch([tmp_path, installed], decode("mailbox", "--device cuda")).stderr


def test_a_manager_of_another_name_is_refused(installed: Path, tmp_path: Path) -> None:
    """Peers would look for the backend under the name of the manager."""
    write_package(tmp_path, "renamed", "letterbox = pd_mailbox:MailboxBackend")
    ended = launch([tmp_path, installed], decode("letterbox"))
    assert ended.returncode == ENVIRONMENT
    assert "its manager's name is 'mailbox', not 'letterbox'" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


# What MANAGER is completed with, and what the refusal then says.
INCOMPLETE = {
    "no patience": ("", "its manager's patience is None, not the Patience"),
    "another patience": ("patience = 3.0", "its manager's patience is 3.0, not the Patience"),
    "no name": ("name = None", "its manager's name is None, not 'sketch'"),
    "addresses that are no strings": (
        "patience = Patience(); address = lambda self: {'port': 1}",
        "peers could not read its manager's addresses: Expected `str`, got `int`",
    ),
    "an address that raises": (
        "patience = Patience(); address = lambda self: self.port",
        "AttributeError: 'Manager' object has no attribute 'port'",
    ),
    "no address of its own": (
        "patience = Patience(); addresses = lambda self: {'tcp': {}}",
        "its manager's addresses have none for 'sketch'",
    ),
    "no shape": (
        "patience = Patience(); address = lambda self: {'port': '1'}",
        "its manager has no shape: call TransferManager.__init__",
    ),
}
MANAGER = """
from pd.util.starvation import Patience
from pd.transfer.backend import TransferBackend
from pd.transfer.base import TransferManager

closed = []

class Manager(TransferManager):
    name = "sketch"
    connect = disconnect = open_sender = open_receiver = None

    def __init__(self, *args, **more):
        pass

    def address(self):
        return {}

    def close(self):
        closed.append(self)
        raise RuntimeError("nothing is open")

    WHAT_IT_ADDS

class Backend(TransferBackend):
    def manager_class(self):
        return Manager
"""


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_manager_is_closed_and_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, cause = INCOMPLETE[case]
    offer_sketch(MANAGER.replace("WHAT_IT_ADDS", added), tmp_path, monkeypatch)
    with pytest.raises(SetupError) as refused:
        make_transfer_manager("sketch", make_pool(16, 4), "X")
    assert "transfer backend sketch of package sketch is broken: " in refused.value.message
    assert cause in refused.value.message
    assert len(sys.modules["sketch_module"].closed) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "OSError(98, 'Address already in use')",
            "cannot listen for KV data on 127.0.0.1: Address already in use",
        ),
        (
            "ImportError('no module named wires')",
            "transfer backend sketch cannot be loaded: no module named wires",
        ),
    ],
)
def test_errors_that_make_names_are_reported_as_those_of_built_in_backends(
    error: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"""
        from pd.transfer.backend import TransferBackend

        class Backend(TransferBackend):
            def manager_class(self):
                raise {error}
        """
    offer_sketch(module, tmp_path, monkeypatch)
    with pytest.raises(SetupError) as refused:
        make_transfer_manager("sketch", make_pool(16, 4), "X")
    assert refused.value.message == message


def offer_sketch(module: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package ``sketch`` in this process, for one test."""
    write_package(root, "sketch", "sketch = sketch_module:Backend", module)
    monkeypatch.syspath_prepend(root)
    monkeypatch.delitem(sys.modules, "sketch_module", raising=False)


def test_spellings_of_one_package_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an older installer has left its own notes of a package."""
    for name in ("My_Sketch.Pad", "my-sketch--pad"):
        write_package(tmp_path, name, "pad = tcp:Backend")
    monkeypatch.syspath_prepend(tmp_path)
    assert [offer.entry_point.name for offer in find_outside()["pad"]] == ["pad"]


def test_names_that_cannot_be_typed_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("", "two words", "smörgås", "a/b", "of-its.own_2")
    write_package(tmp_path, "odd", "\n".join(f"{name} = tcp:Backend" for name in names))
    monkeypatch.syspath_prepend(tmp_path)
    assert backend_names()[-2:] == ("fake", "of-its.own_2")
    for name in names[:-1]:
        with pytest.raises(UsageError, match="unknown transfer backend"):
            find_backend(name)
    with caplog.at_level(logging.WARNING):
        make_transfer_manager("tcp", make_pool(16, 4), "X").close()
    for name in names[:-1]:
        assert f"the transfer backend {name!r} of odd is ignored: a name has" in caplog.text
