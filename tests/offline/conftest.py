"""An offline model and a server of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from offline_settings import SETTINGS

from pd import LLM
from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

# The embedded model's own template knows no tools.
_TOOLS = (
    "{% if tools %}<|im_start|>system\nReturn a json object with function name and arguments "
    "within <tool_call></tool_call>.\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of the embedded model's tokenizer, with a template that shows tools."""
    directory = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", directory)
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    config["chat_template"] = _TOOLS + config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="session")
def llm(tokenizer: str) -> Iterator[LLM]:
    """A model with an engine process, for all tests that leave it as it was."""
    with LLM(EMBEDDED_MODEL, tokenizer=tokenizer, **SETTINGS) as model:
        yield model


@pytest.fixture(scope="session")
def url(tokenizer: str) -> Iterator[str]:
    """Address of a proxy with a unified node."""
    from cluster import start_node

    from pd.proxy.config import ProxyConfig
    from pd.proxy.server import ProxyThread

    node = start_node("unified", EMBEDDED_MODEL)
    with ProxyThread(ProxyConfig(unified=[node.url], port=0, tokenizer=tokenizer)) as proxy:
        yield proxy.url
    node.stop()


@pytest.fixture(scope="session")
def remote(url: str) -> Iterator[LLM]:
    """The same model as :func:`llm`, at a running deployment."""
    with LLM(url=url) as model:
        yield model
