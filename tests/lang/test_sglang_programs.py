"""SGLang's own test programs run on ``pd.lang``, with only the import changed.

The file is in SGLang's wheel, which we do not ship. `make test-all` gets it with
`sh scripts/peer_environment.sh sglang-programs .peers`.

The programs assume a clever model, and some assert its answers. We let these assertions fail, but
no other error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import pd.lang as pl
import pd.lang.ir
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = os.environ.get("PD_TEST_SGLANG_PROGRAMS", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not FILE, reason="PD_TEST_SGLANG_PROGRAMS names no file"),
]

PROGRAMS = [
    "test_few_shot_qa",
    "test_mt_bench",
    "test_select",
    "test_decode_int",
    "test_decode_json_regex",
    "test_decode_json",
    "test_expert_answer",
    "test_tool_use",
    "test_react",
    "test_parallel_decoding",
    "test_stream",
    "test_stream_logprobs",
    "test_regex",
    "test_dtype_gen",
    "test_chat_completion_speculative",
    "test_gen_min_new_tokens",
]
ARGUMENTS = {"test_select": {"check_answer": False}, "test_expert_answer": {"check_answer": False}}
# These end in what a model made of the program's text: an expression to evaluate, a JSON value that
# a limit cut off, a turn in the form of an example, or an answer that the model never gives.
CLEVER = (AssertionError, SyntaxError, NameError, ValueError, KeyError)


def make_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def get_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Any]]:
    """The functions of the file, with ``sglang`` bound to ``pd.lang``."""
    modules = {
        "sglang": pl,
        "sglang.lang": pl,
        "sglang.lang.ir": pd.lang.ir,
        "sglang.srt": make_module("sglang.srt"),
        "sglang.srt.utils": make_module("sglang.srt.utils", is_hip=lambda: False),
        "sglang.srt.utils.hf_transformers_utils": make_module("x", get_tokenizer=get_tokenizer),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield runpy.run_path(FILE)


@pytest.mark.usefixtures("default_backend")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_sglang_runs(name: str, programs: dict[str, Any], url: str) -> None:
    if name == "test_chat_completion_speculative":
        pl.set_default_backend(pl.OpenAI("embedded", base_url=f"{url}/v1", api_key="none"))
    try:
        programs[name](**ARGUMENTS.get(name, {}))
    except CLEVER as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, KeyError):
            assert (name, error.args) == ("test_react", ("answer",))
            frames = [frame for frame in frames if frame.filename == FILE]
        assert frames[-1].filename in (FILE, "<string>") or "json" in frames[-1].filename, error
        print(f"{name}: the model is not clever enough: {error!r}")


CHARACTER = " Ada Berg.\nBirthday: May 1, 1970.\nJob: Nurse.\n"


def complete_character(request: httpx.Request) -> httpx.Response:
    """Answer as a model that keeps the form of the character in the prompt."""
    body = json.loads(request.content)
    said = body["prompt"].rpartition("Name:")[2]
    text = CHARACTER.removeprefix(said).partition((body.get("stop") or ["never"])[0])[0]
    choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": 1}
    facts = {"id": "x", "object": "text_completion", "created": 0, "model": "m"}
    return httpx.Response(200, json=facts | {"choices": [choice], "usage": usage})


def test_speculation_on_completions_saves_tokens(programs: dict[str, Any]) -> None:
    client = httpx.Client(transport=httpx.MockTransport(complete_character))
    backend = pl.OpenAI(
        "m", is_chat_model=False, api_key="none", base_url="http://test/v1", http_client=client
    )
    pl.set_default_backend(backend)
    try:
        programs["test_completion_speculative"]()
    finally:
        pl.set_default_backend(None)
    assert backend.token_usage.calls == 3


@pytest.mark.usefixtures("default_backend")
@pytest.mark.parametrize("name", ["test_image_qa", "test_parallel_encoding"])
def test_programs_of_refused_features_are_refused_by_name(
    name: str, programs: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"image|concate_and_append"):
        programs[name]()
