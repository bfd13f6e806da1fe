"""``--transfer-backend auto``: which backends a node offers, and that each pair uses its own."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transfer_helpers import hand_off, make_pool, node_info, reservation

from pd.core.errors import HandshakeError, SetupError, TransferError
from pd.transfer import registry as factory
from pd.transfer.chooser import ChoosingManager
from pd.transfer.fake.manager import FakeManager
from pd.transfer.registry import check_backend, make_transfer_manager
from pd.transfer.tcp.manager import TcpManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transfer_helpers import Pool

    from pd.transfer.base import TransferManager

    Make = Callable[..., TransferManager]

MAKERS = {"tcp": TcpManager, "fake": FakeManager}
POOL = make_pool(64, 4)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TransferManager] = []

    def choosing(instance: str, *names: str, pool: Pool = POOL) -> TransferManager:
        managers = [MAKERS[name](pool, instance) for name in names]
        made.append(ChoosingManager(managers))
        return made[-1]

    yield choosing
    for manager in made:
        manager.close()


def introduce(p: TransferManager, d: TransferManager, d_name: str = "D") -> None:
    p.connect(node_info(d_name, "decode", d, POOL))
    d.connect(node_info("P", "prefill", p, POOL))


def move(p: TransferManager, d: TransferManager, source: Pool, target: Pool, d_name: str) -> None:
    pages = np.arange(4, dtype=np.int32)
    room = d_name.encode().ljust(16)
    receiver = d.receiver("P", room, 1, pages, (0,), 16)
    sender = p.sender(d_name, reservation(receiver, room, 1, 0), pages, 16)
    sender.send(0, 16, 0, source.layout.num_layers)
    hand_off(sender, receiver)
    assert torch.equal(target.tokens(pages, 0, 16), source.tokens(pages, 0, 16))


def test_each_pair_uses_the_first_backend_of_p_that_both_offer(make: Make) -> None:
    source = make_pool(64, 4, seed=1)
    p = make("P", "fake", "tcp", pool=source)
    for name, offers, expected in [
        ("D1", ("tcp", "fake"), "fake"),
        ("D2", ("tcp",), "tcp"),
        ("D3", ("fake",), "fake"),
    ]:
        target = make_pool(64, 4, fill=0.0)
        d = make(name, *offers, pool=target)
        introduce(p, d, name)
        assert (p.backend_of(name), d.backend_of("P")) == (expected, expected)
        move(p, d, source, target, name)


def test_a_node_of_one_backend_works_with_one_that_chooses(make: Make) -> None:
    source, target = make_pool(64, 4, seed=1), make_pool(64, 4, fill=0.0)
    p = make("P", "fake", "tcp", pool=source)
    d = TcpManager(target, "D")
    introduce(p, d)
    assert (p.backend_of("D"), d.backend_of("P")) == ("tcp", "tcp")
    move(p, d, source, target, "D")
    d.close()


def test_only_connected_peers_have_a_backend(make: Make) -> None:
    p, d = make("P", "fake", "tcp"), make("D", "tcp", "fake")
    pages = np.arange(1, dtype=np.int32)
    for _ in range(2):
        introduce(p, d)
        receiver = d.receiver("P", bytes(16), 1, pages, (0,), 4)
        kept = reservation(receiver, bytes(16), 1, 0)
        p.disconnect("D")
        d.disconnect("P")
        assert (p.backend_of("D"), d.backend_of("P")) == ("", "")
        with pytest.raises(TransferError, match="D is not connected"):
            p.sender("D", kept, pages, 4)
        with pytest.raises(TransferError, match="P is not connected"):
            d.receiver("P", bytes(16), 2, pages, (0,), 4)
    p.disconnect("never seen")


def test_nothing_in_common_is_refused(make: Make) -> None:
    p, d = make("P", "fake"), make("D", "tcp")
    with pytest.raises(HandshakeError, match=r"D, which offers tcp; this node offers fake"):
        p.connect(node_info("D", "decode", d, POOL))
    assert p.backend_of("D") == ""


def missing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in names else find(name)
    )


@pytest.mark.parametrize("library", ["nixl", "mooncake"])
def test_a_missing_library_ends_an_explicit_choice_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    missing(monkeypatch, library)
    with pytest.raises(SetupError, match=rf"pip install 'pd-serve\[{library}\]'"):
        check_backend(library)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_nvlink_refuses_expandable_segments_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(SetupError, match=f"nvlink: .*expandable segments.*unset {variable}"):
        check_backend("nvlink")
    monkeypatch.setenv(variable, "expandable_segments:False")
    with pytest.raises(SetupError, match="nvlink: the KV cache is on the CPU"):
        check_backend("nvlink", device="cpu")


def test_auto_leaves_out_what_cannot_work_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing(monkeypatch, "nixl")
    check_backend("auto")
    with caplog.at_level(logging.INFO):
        manager = make_transfer_manager("auto", POOL, "X")
    try:
        assert list(manager.addresses()) == ["tcp"]
        assert manager.name == "tcp", "one backend needs no choice"
        assert "nvlink is left out: the KV cache is on the CPU" in caplog.text
        assert "nixl is left out: the library is missing" in caplog.text
    finally:
        manager.close()


def test_a_backend_that_does_not_start_is_left_out_of_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object, **kwargs: object) -> TransferManager:
        raise SetupError("its device is on fire")

    monkeypatch.setattr(factory, "AUTO", ("fake", "tcp"))
    monkeypatch.setattr(FakeManager, "__init__", broken)
    with caplog.at_level(logging.INFO):
        manager = make_transfer_manager("auto", POOL, "X")
    manager.close()
    assert list(manager.addresses()) == ["tcp"]
    assert "fake is left out: its device is on fire" in caplog.text
    with pytest.raises(SetupError, match="on fire"):
        make_transfer_manager("fake", POOL, "X")


def test_auto_offers_all_that_work_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "AUTO", ("fake", "tcp"))
    manager = make_transfer_manager("auto", POOL, "X")
    try:
        assert list(manager.addresses()) == ["fake", "tcp"]
        assert manager.addresses() == manager.addresses()
    finally:
        manager.close()


def test_auto_without_a_usable_address_is_an_error_that_says_so() -> None:
    with pytest.raises(SetupError, match=r"cannot listen for KV data on 127\.9\.9\.300"):
        make_transfer_manager("auto", POOL, "X", "127.9.9.300", cluster_key=b"k" * 16)
