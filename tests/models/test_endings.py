"""Which tokens end an answer, by what the files of a checkpoint say."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import write_tokenizer
from tiny import VOCAB_SIZE, tiny_model

from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.engine.engine import Engine
from pd.models.config_reader import read_model_config

if TYPE_CHECKING:
    from pathlib import Path

END, END_ID = "<|im_end|>", 200


def checkpoint(
    directory: Path,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
) -> Path:
    """Write the files of a model whose config.json names no end unless ``config`` does."""
    raw = json.loads((tiny_model() / "config.json").read_text())
    del raw["eos_token_id"]
    found = {"config.json": raw | (config or {}), "generation_config.json": generation}
    found["tokenizer_config.json"] = tokenizer
    found |= {"tokenizer.json": {"added_tokens": [{"id": END_ID, "content": END}]}, **(files or {})}
    for name, content in found.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text)
    return directory


def endings(*args: Any, **files: Any) -> tuple[int, ...]:
    return read_model_config(checkpoint(*args, **files)).eos_token_ids


@pytest.mark.parametrize("file", ["config", "generation", "both"])
@pytest.mark.parametrize(
    ("named", "usable"),
    [
        ({"eos_token_id": 0}, {0}),
        ({"eos_token_id": [0, 7]}, {0, 7}),
        ({"eos_token_id": []}, set()),
        ({"eos_token_id": None}, set()),
        ({"eos_token_id": -1}, set()),
        ({"eos_token_id": VOCAB_SIZE}, set()),
        ({"eos_token_id": [5, -1, 1 << 70]}, {5}),
        ({"eos_token_id": END_ID}, set()),
    ],
)
def test_the_tokenizers_end_counts_whatever_the_other_files_name(
    tmp_path: Path, file: str, named: dict[str, Any], usable: set[int]
) -> None:
    config = None if file == "generation" else named
    generation = None if file == "config" else named
    found = endings(tmp_path, config, generation, {"eos_token": END})
    assert found == tuple(sorted(usable | {END_ID}))


def test_where_no_file_has_an_id_the_tokenizers_joins_the_one_that_is_assumed(
    tmp_path: Path,
) -> None:
    assert endings(tmp_path, None, None, {"eos_token": END}) == (2, END_ID)


@pytest.mark.parametrize(
    ("tokenizer", "files"),
    [
        ({"eos_token": END}, {}),
        ({"eos_token": {"__type": "AddedToken", "content": END, "lstrip": False}}, {}),
        (None, {"special_tokens_map.json": {"eos_token": END}}),
        ({"bos_token": "<s>"}, {"special_tokens_map.json": {"eos_token": {"content": END}}}),
        ({"eos_token": END}, {"tokenizer.json": {"model": {"vocab": {END: END_ID}}}}),
        (
            {"eos_token": END},
            {"tokenizer.json": {"model": {"vocab": [["", 0.0]] * END_ID + [[END, -1.5]]}}},
        ),
        (
            {"eos_token": END, "added_tokens_decoder": {str(END_ID): {"content": END}}},
            {"tokenizer.json": None},
        ),
        ({"eos_token": END}, {"tokenizer.json": None, "added_tokens.json": {END: END_ID}}),
        (
            # The tokenizer is made of tokenizer.json.
            {"eos_token": END, "added_tokens_decoder": {"7": {"content": END}}},
            {"added_tokens.json": {END: 8}},
        ),
    ],
)
def test_the_end_is_found_wherever_a_tokenizer_keeps_it(
    tmp_path: Path, tokenizer: Any, files: dict[str, Any]
) -> None:
    assert endings(tmp_path, {"eos_token_id": 0}, None, tokenizer, files) == (0, END_ID)


@pytest.mark.parametrize(
    ("tokenizer", "files"),
    [
        (None, {}),
        ({"eos_token": None}, {"special_tokens_map.json": {"eos_token": END}}),
        ({"eos_token": ""}, {}),
        ({"eos_token": 5}, {}),
        ({"eos_token": ["a"]}, {}),
        ("[]", {}),
        ("{", {}),
        ({"eos_token": "<absent>"}, {}),
        ({"eos_token": END}, {"tokenizer.json": "{"}),
        ({"eos_token": END}, {"tokenizer.json": "[1]"}),
        ({"eos_token": END}, {"tokenizer.json": {"added_tokens": 5, "model": []}}),
        ({"eos_token": END}, {"tokenizer.json": {"added_tokens": [{"content": END}]}}),
        ({"eos_token": END}, {"tokenizer.json": {"model": {"vocab": {END: True}}}}),
        ({"eos_token": "\ud800"}, {}),
    ],
)
def test_a_tokenizer_without_a_usable_end_changes_nothing(
    tmp_path: Path, tokenizer: Any, files: dict[str, Any]
) -> None:
    assert endings(tmp_path, {"eos_token_id": 9}, None, tokenizer, files) == (9,)


def test_a_tokenizer_of_transformers_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    raw = json.loads((tiny_model(vocab_size=320) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": 0}))
    assert read_model_config(tmp_path).eos_token_ids == (0, 257)


@pytest.mark.parametrize("value", [True, "2", [2, None], [2, "2"], 2.0, {"a": 1}, [[2]]])
def test_ids_that_are_none_are_refused_with_their_file(tmp_path: Path, value: object) -> None:
    path = checkpoint(tmp_path, {"eos_token_id": 2}, {"eos_token_id": value})
    with pytest.raises(UsageError, match=r"generation_config.json: eos_token_id must be an int"):
        read_model_config(path)


def problems(*args: Any, **files: Any) -> str:
    return "; ".join(read_model_config(checkpoint(*args, **files)).eos_problems)


def test_what_can_never_be_output_is_named(tmp_path: Path) -> None:
    found = problems(tmp_path, {"eos_token_id": [3, -1]}, {"eos_token_id": VOCAB_SIZE})
    assert "eos_token_id -1 of config.json is not in the model's vocabulary of 256" in found
    assert f"eos_token_id {VOCAB_SIZE} of generation_config.json is not in" in found
    assert "no token ends an answer" not in found


@pytest.mark.parametrize(
    ("token", "token_id", "named"),
    [
        (END, VOCAB_SIZE, "'<|im_end|>' with the id 256 is not in the model's vocabulary"),
        ("<gone>", END_ID, "eos_token '<gone>' is not in its vocabulary"),
        ("\x1b[31m\n" + "x" * 5000, END_ID, r"'\x1b[31m\nxxx"),
    ],
)
def test_a_tokenizers_end_that_can_never_be_output_is_named(
    tmp_path: Path, token: str, token_id: int, named: str
) -> None:
    files = {"tokenizer.json": {"added_tokens": [{"id": token_id, "content": END}]}}
    found = problems(tmp_path, {"eos_token_id": 3}, None, {"eos_token": token}, files)
    assert named in found
    assert len(found) < 300 and found.isprintable()


def test_nothing_is_named_where_all_is_well(tmp_path: Path) -> None:
    assert not problems(tmp_path, {"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {"eos_token": END})


def test_a_model_without_any_end_is_told_apart_from_one_that_wants_none(tmp_path: Path) -> None:
    assert "no token ends an answer" in problems(tmp_path, {"eos_token_id": -1})
    assert not problems(tmp_path, {"eos_token_id": None})


def test_the_node_logs_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = checkpoint(tmp_path, {"eos_token_id": 999})
    config = NodeConfig(
        role="unified", model=model, load_format="dummy", device="cpu", kv_cache_tokens=64
    )
    with caplog.at_level(logging.WARNING):
        Engine.build(config)
    logged = [r.getMessage() for r in caplog.records if "eos_token_id 999" in r.getMessage()]
    assert len(logged) == 1
