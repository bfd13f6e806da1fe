"""Fixtures of the proxy's tests."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Tests of one room also use helpers of the API's and the text room's tests.
sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parent / room) for room in ("api", "batches", "text")]

from certificates import Authority, CertificateFiles
from proxy_cluster import Cluster
from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    byte_level().save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture
def cluster(model_dir: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, model_dir)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A private authority."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def files(authority: Authority) -> CertificateFiles:
    """A certificate for this host."""
    return authority.issue("localhost")
