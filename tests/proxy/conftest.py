"""Fixtures of the proxy's tests."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forked_children import fork_children
from proxy_cluster import PROCESSES, Cluster
from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def forked_children() -> Iterator[None]:
    """Where each test has a proxy of several processes these start quickly."""
    if PROCESSES > 1:
        yield from fork_children()
    else:
        yield


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
