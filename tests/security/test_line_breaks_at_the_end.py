"""A value that ends with a line break passes no pattern that checks values.

Python's ``$`` also matches before a line break at the end; msgspec searches with it. Pydantic's
``$``, and that of patterns which constrain output, match at the end only.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import xgrammar

from pd.cluster import orders, spec
from pd.grammar.xgrammar_library import Compiler, accepts_text
from pd.proxy.nodes.node_handle import ServerInfo

INFO: dict[str, Any] = {
    "role": "decode",
    "instance_id": "node-1",
    "model": "m",
    "page_size": 16,
    "context_length": 4096,
    "endpoints": {"zmq": "tcp://10.0.0.1:5000", "bootstrap": "http://10.0.0.1:5001/"},
    "pages": {"total": 10},
    "model_path": "/m",
    "model_id": "a",
    "dtype": "float32",
    "drafter": "ngram",
    "transfer_backend": "tcp",
    "transfer_backends": ["tcp"],
}
TEXTS = [name for name, value in INFO.items() if isinstance(value, str) and name != "role"]


def changed(field: str, suffix: str) -> dict[str, Any]:
    if field in INFO["endpoints"]:
        return INFO | {"endpoints": INFO["endpoints"] | {field: INFO["endpoints"][field] + suffix}}
    if field == "transfer_backends":
        return INFO | {field: ["tcp" + suffix]}
    return INFO | {field: INFO[field] + suffix}


@pytest.mark.parametrize("field", [*TEXTS, "zmq", "bootstrap", "transfer_backends"])
def test_a_nodes_description_has_no_line_break_at_the_end_of_a_text(field: str) -> None:
    msgspec.convert(changed(field, ""), ServerInfo)
    for suffix in ("\n", "\r\n", "\n\n", "\r"):
        with pytest.raises(msgspec.ValidationError, match="regex"):
            msgspec.convert(changed(field, suffix), ServerInfo)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(spec.Name, "a"), (orders.Name, "prefill-0"), (dict[spec.Variable, str], {"HOME": "x"})],
)
def test_a_deployments_file_has_no_line_break_at_the_end_of_a_name(kind: Any, value: Any) -> None:
    msgspec.convert(value, kind)
    wrong = {f"{key}\n": "x" for key in value} if isinstance(value, dict) else f"{value}\n"
    with pytest.raises(msgspec.ValidationError, match="regex"):
        msgspec.convert(wrong, kind)


def test_output_has_no_line_break_behind_the_end_of_its_pattern() -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"</s>"]
    compiler = Compiler(xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256]))
    for pattern in ("^a$", "a$", "^a"):
        compiled = compiler.compile_text("regex", pattern)
        assert accepts_text(compiled, "a")
        assert not accepts_text(compiled, "a\n")
    schema = {"type": "string", "pattern": "^a$"}
    compiled = compiler.compile_text("json_schema", json.dumps(schema))
    assert accepts_text(compiled, '"a"')
    for text in ('"a\n"', '"a\\n"'):
        assert not accepts_text(compiled, text)
