"""The cluster key and the keys derived from it."""

from __future__ import annotations

import base64
import subprocess
import sys
from random import Random

import pytest
import zmq

from pd.core.errors import UsageError
from pd.net.cluster_key import (
    derive_admin_key,
    derive_bootstrap_key,
    derive_client_keypair,
    derive_key,
    derive_server_keypair,
    load_cluster_key,
)

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
    with pytest.raises(UsageError, match="at least 16") as raised:
        load_cluster_key(path)
    assert "secret" not in str(raised.value)
    assert KEY[:-1].decode() not in str(raised.value)


def test_a_missing_file_is_a_usage_error(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot read the cluster key"):
        load_cluster_key(tmp_path / "nothing")


WEAK = {
    "one character": "k" * 64,
    "few characters": "0101101110100010" * 3 + "1",
    "a repeated word": "password" * 4,
    "an alphabet": "abcdefghijklmnopqrstuvwxyz",
    "digits in order": "0123456789abcdef",
    "words": "correct horse battery staple",
    "words with dashes": "secret-cluster-key-of-this-test",
    "one word": "averylongsecretthatnobodyknows",
    "64 random bits": "8d3e1f50b7c6a294",
}


@pytest.mark.parametrize("kind", WEAK)
def test_a_weak_key_causes_a_warning_that_does_not_show_it(tmp_path, caplog, kind) -> None:
    path = tmp_path / "key"
    path.write_text(WEAK[kind])
    path.chmod(0o600)
    assert load_cluster_key(path) == WEAK[kind].encode()
    assert "can be guessed" in caplog.text
    assert "openssl rand -hex 32" in caplog.text
    assert WEAK[kind] not in caplog.text


def test_random_keys_cause_no_warning(tmp_path, caplog, seed) -> None:
    random = Random(seed)
    path = tmp_path / "key"
    path.touch(0o600)
    for _ in range(300):
        raw = random.randbytes(32)
        # 16 random bytes without a digit in Base64 are warned of, 32 hardly ever.
        for key in (raw, raw[:16], raw.hex().encode(), raw[:16].hex().encode()):
            path.write_bytes(key)
            if len(key.strip()) == len(key):
                load_cluster_key(path)
    for _ in range(20):
        key = base64.b64encode(random.randbytes(32))
        if any(digit in key for digit in b"0123456789"):  # all but one in 1,500
            path.write_bytes(key)
            load_cluster_key(path)
    assert caplog.text == ""


def test_each_purpose_has_its_own_key() -> None:
    keys = {derive_key(KEY, purpose) for purpose in ("transfer", "bootstrap", "curve", "admin")}
    assert len(keys) == 4
    assert all(len(key) == 32 and key != KEY for key in keys)
    assert derive_key(KEY, "admin") == derive_key(KEY, "admin")
    assert derive_key(KEY + b"x", "admin") != derive_key(KEY, "admin")
    assert derive_admin_key(KEY) == derive_key(KEY, "admin")
    assert derive_bootstrap_key(KEY) == derive_key(KEY, "bootstrap")
    assert derive_admin_key(None) is derive_bootstrap_key(None) is None


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq has no CURVE")
def test_curve_keys_agree_for_all_holders_of_the_key() -> None:
    server, client = derive_server_keypair(KEY, "P"), derive_client_keypair(KEY)
    assert server == derive_server_keypair(KEY, "P")
    others = [client, derive_server_keypair(KEY, "Q"), derive_server_keypair(KEY + b"x", "P")]
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
