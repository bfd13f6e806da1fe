"""The cluster key and what is derived from it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zmq

from pd.core.cluster_key import (
    admin_key,
    bootstrap_key,
    curve_client_keypair,
    curve_server_keypair,
    derive,
    load_cluster_key,
)
from pd.core.errors import UsageError

KEY = b"0123456789abcdef"


@pytest.mark.parametrize("content", [KEY, KEY + b"\n", b"  " + KEY + b"\r\n"])
def test_a_key_is_read_without_the_white_space_around_it(tmp_path, content) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    assert load_cluster_key(path) == KEY


@pytest.mark.parametrize("content", [b"", b"secret\n", KEY[:-1] + b"   "])
def test_a_short_key_is_refused_and_not_shown(tmp_path, content) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="at least 16 are needed") as raised:
        load_cluster_key(path)
    assert "secret" not in str(raised.value)
    assert KEY[:-1].decode() not in str(raised.value)


def test_a_missing_file_is_a_usage_error(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot read the cluster key"):
        load_cluster_key(tmp_path / "nothing")


def test_each_purpose_has_its_own_key() -> None:
    keys = {derive(KEY, purpose) for purpose in ("transfer", "bootstrap", "curve", "admin")}
    assert len(keys) == 4
    assert all(len(key) == 32 and key != KEY for key in keys)
    assert derive(KEY, "admin") == derive(KEY, "admin")
    assert derive(KEY + b"x", "admin") != derive(KEY, "admin")
    assert admin_key(KEY) == derive(KEY, "admin")
    assert bootstrap_key(KEY) == derive(KEY, "bootstrap")
    assert admin_key(None) is bootstrap_key(None) is None


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_curve_keys_are_the_same_for_all_who_have_the_key_and_work() -> None:
    server, client = curve_server_keypair(KEY, "P"), curve_client_keypair(KEY)
    assert server == curve_server_keypair(KEY, "P")
    others = [client, curve_server_keypair(KEY, "Q"), curve_server_keypair(KEY + b"x", "P")]
    assert len({server, *others}) == 4
    assert all(zmq.curve_public(secret) == public for public, secret in (server, *others))
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.curve_server = True
        pull.curve_publickey, pull.curve_secretkey = server
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        with context.socket(zmq.PUSH) as push:
            push.curve_serverkey = server[0]
            push.curve_publickey, push.curve_secretkey = client
            push.connect(f"tcp://127.0.0.1:{port}")
            push.send(b"hello")
            assert pull.poll(10_000)
            assert pull.recv() == b"hello"


def test_bootstrap_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import pd.bootstrap, sys; print([m for m in ('torch', 'pd.engine') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
