"""Everything that decides a node's answers is in its identity, by name, and nothing else is."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from checkpoints import write_tokenizer
from tiny import tiny_model

from pd.core.config import QUANTIZATIONS, NodeConfig
from pd.core.node_info import Identity
from pd.engine.engine import Engine
from pd.engine.identity import build_identity, digest_identity
from pd.models.checkpoint import hash_weights
from pd.models.config_reader import read_model_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Checkpoint = Callable[[str], Path]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with every file that a checkpoint may have, but for weights."""
    path = shutil.copytree(tiny_model(vocab_size=320), tmp_path / "model")
    write_tokenizer(path)
    change(path, "config.json", rope_scaling=LLAMA3_ROPE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    (path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
    return path


def change(path: Path, file: str, **values: Any) -> None:
    settings = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(settings | values))


def identity(path: Path, **settings: Any) -> dict[str, str]:
    config = NodeConfig(role="unified", model=path, **{"load_format": "dummy"} | settings)
    found = build_identity(config, read_model_config(path))
    assert msgspec.convert(found, Identity) == found, "others take it"
    return found


def changed_names(path: Path, file: str, **values: Any) -> set[str]:
    before = identity(path)
    change(path, file, **values)
    after = identity(path)
    assert (digest_identity(before) != digest_identity(after)) == (before != after)
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("file", "values", "names"),
    [
        ("config.json", {"eos_token_id": 9}, {"eos_token_ids"}),
        ("config.json", {"eos_token_id": [255, 9]}, {"eos_token_ids"}),
        ("config.json", {"rms_norm_eps": 1e-6}, {"rms_norm_eps"}),
        ("config.json", {"rope_theta": 500.0}, {"rope.theta"}),
        ("config.json", {"rope_scaling": None}, {
            "rope.type", "rope.factor", "rope.original_context",
        }),
        ("config.json", {"rope_scaling": LLAMA3_ROPE | {"factor": 4.0}}, {"rope.factor"}),
        ("config.json", {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, {
            "rope.low_freq_factor",
        }),
        ("config.json", {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 8.0}}, {
            "rope.high_freq_factor",
        }),
        ("config.json", {"original_max_position_embeddings": 64}, {"rope.original_context"}),
        ("config.json", {"vocab_size": 321}, {"vocab_size"}),
        ("config.json", {"hidden_size": 64, "head_dim": 8}, {"hidden_size"}),
        ("config.json", {"head_dim": 16}, {"head_dim"}),
        ("config.json", {"num_hidden_layers": 3}, {"num_layers"}),
        ("config.json", {"num_key_value_heads": 4}, {"num_kv_heads"}),
        ("config.json", {"intermediate_size": 64}, {"intermediate_size"}),
        ("config.json", {"tie_word_embeddings": True}, {"tie_word_embeddings"}),
        ("config.json", {"attention_bias": True}, {"attention_bias", "output_bias"}),
        ("config.json", {"mlp_bias": True}, {"mlp_bias"}),
        ("config.json", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, {
            "architecture",
        }),
        ("generation_config.json", {"eos_token_id": [7, 8]}, {"eos_token_ids"}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, {"eos_token", "eos_token_ids"}),
        ("tokenizer_config.json", {"bos_token": "<|im_end|>"}, {"bos_token"}),
        ("tokenizer_config.json", {"pad_token": "<|im_end|>"}, {"pad_token"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, {"chat_template"}),
        ("tokenizer_config.json", {"chat_template": None}, {"chat_template"}),
        ("tokenizer_config.json", {
            "chat_template": [{"name": "default", "template": "a"},
                              {"name": "tool_use", "template": "b"}],
        }, {"chat_template"}),
        ("tokenizer.json", {"added_tokens": []}, {"vocabulary"}),
        ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, {"tokenizer"}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, {"tokenizer"}),
        ("tokenizer.json", {"post_processor": {"type": "ByteLevel"}}, {"tokenizer"}),
        ("special_tokens_map.json", {"unk_token": "<other>"}, {"unk_token"}),
    ],
)  # fmt: skip
def test_a_setting_that_decides_answers_is_named(
    model: Path, file: str, values: dict[str, Any], names: set[str]
) -> None:
    assert changed_names(model, file, **values) == names


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1}, [["a", 0.0], ["b", -1.0]]])
def test_other_ids_of_tokens_are_another_vocabulary(model: Path, vocabulary: object) -> None:
    found = json.loads((model / "tokenizer.json").read_text())["model"]
    names = changed_names(model, "tokenizer.json", model=found | {"vocab": vocabulary})
    assert names == {"vocabulary"}
    merges = changed_names(
        model, "tokenizer.json", model=found | {"vocab": vocabulary, "merges": []}
    )
    assert merges == {"tokenizer"}


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"_name_or_path": "elsewhere", "transformers_version": "4.0"}),
        ("config.json", {"max_position_embeddings": 512}),
        ("config.json", {"torch_dtype": "float16"}),
        ("config.json", {"bos_token_id": 3}),
        ("config.json", {"eos_token_id": [255, 7, -1, 1 << 40]}),
        ("config.json", {"use_cache": False}),
        ("generation_config.json", {"max_length": 20}),
        ("tokenizer_config.json", {"model_max_length": 9, "name_or_path": "elsewhere"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|eos|>", "lstrip": True}}),
        ("tokenizer.json", {"truncation": {"max_length": 4}, "padding": {"length": 4}}),
        ("special_tokens_map.json", {"eos_token": "<gone>"}),
    ],
)
def test_what_decides_nothing_is_left_out(model: Path, file: str, values: dict[str, Any]) -> None:
    """Capacities, names, ids that cannot occur, and what other settings go before."""
    assert changed_names(model, file, **values) == set()


def test_files_of_templates_count_like_those_in_the_settings(model: Path) -> None:
    before = identity(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    after = identity(model)
    assert {name for name in before if before[name] != after[name]} == {"chat_template"}
    change(
        model,
        "tokenizer_config.json",
        chat_template=[
            {"name": "default", "template": "{{ messages }}"},
            {"name": "tool_use", "template": "tools"},
        ],
    )
    shutil.rmtree(model / "additional_chat_templates")
    (model / "chat_template.jinja").unlink()
    assert identity(model) == after, "the same templates in another place"


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_only_one_node_has_is_named(model: Path, file: str) -> None:
    before = identity(model)
    (model / file).unlink()
    after = identity(model)
    name = "vocabulary" if file == "tokenizer.json" else "chat_template"
    assert (before[name] != "none", after[name]) == (True, "none")


def test_flags_that_decide_answers_are_named(model: Path) -> None:
    plain = identity(model)
    for settings, name in (
        ({"seed": 1}, "weights"),
        ({"grammar_backend": "none"}, "--grammar-backend"),
        ({"grammar_jump_forward": True}, "--grammar-jump-forward"),
    ):
        other = identity(model, **settings)
        assert {n for n in plain if plain[n] != other[n]} == {name}
    same = identity(model, page_size=4, context_length=99, tp_size=2, ep_size=2, kv_cache_tokens=77)
    assert same == plain


def test_a_node_that_quantizes_its_weights_is_another(model: Path) -> None:
    """Nodes of a pair must compute with the same weights."""
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "kv_cache_tokens": 64}
    plain, fp8 = (
        Engine.build(NodeConfig(role="unified", model=model, quantization=name, **settings))
        for name in QUANTIZATIONS
    )
    assert plain.model_id != fp8.model_id
    differing = {n for n, value in fp8.identity.items() if plain.identity.get(n) != value}
    assert differing == {
        "quantization.in_blocks",
        "quantization.has_input_scales",
        "quantization.rounds_scales",
        "quantization.at_load",
    }


def test_equal_files_in_another_directory_are_the_same(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "a" / "copy")
    for file in other.glob("*.json"):  # written by another program
        file.write_text(json.dumps(json.loads(file.read_text()), indent=3, sort_keys=True))
    link = tmp_path / "link"
    link.symlink_to(model)
    assert identity(other) == identity(model) == identity(link)


def test_values_are_bounded_and_can_be_sent(model: Path) -> None:
    texts = {"bos_token": "\ud800" + "x" * 9000, "sep_token": "\x1b[2J\n", "cls_token": "é" * 200}
    change(model, "tokenizer_config.json", **texts)
    found = identity(model)
    msgspec.json.encode(found)
    assert max(len(value) for value in found.values()) <= 256
    change(model, "tokenizer_config.json", bos_token="\ud800" + "x" * 8999 + "y")
    assert identity(model)["bos_token"] != found["bos_token"], "a digest tells long ones apart"


class TestWeights:
    def test_their_hash_is_short_and_repeatable(self, checkpoint: Checkpoint) -> None:
        path = checkpoint("llama3")
        assert hash_weights(path) == hash_weights(str(path))
        assert len(hash_weights(path)) == 16

    def test_a_link_that_leads_nowhere_beside_the_weights_does_not_count(
        self, checkpoint: Checkpoint, tmp_path: Path
    ) -> None:
        """As a cache has it of which a part was removed."""
        path = checkpoint("llama3")
        for file in path.iterdir():
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "model-old.safetensors").symlink_to(tmp_path / "nowhere")
        assert hash_weights(tmp_path) == hash_weights(path)

    @pytest.mark.parametrize("whole", [True, False])
    def test_other_weights_of_the_same_shape_differ(
        self,
        checkpoint: Checkpoint,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        whole: bool,
    ) -> None:
        path = checkpoint("llama2")
        if not whole:
            monkeypatch.setattr("pd.models.checkpoint._HASHED_WHOLE", 0)
        for file in path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        assert hash_weights(tmp_path) == hash_weights(path)
        weights = tmp_path / "model.safetensors"
        data = bytearray(weights.read_bytes())
        if whole:
            data[-2001] ^= 1
        else:
            data[len(data) // 2 : len(data) // 2 + 8000] = bytes(8000)
        weights.write_bytes(data)
        assert hash_weights(tmp_path) != hash_weights(path)

    def test_it_is_of_the_files_that_the_index_names(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        shard, stray = tmp_path / "weights-1-of-1.safetensors", tmp_path / "model.safetensors"
        index = {"weight_map": {"a": shard.name, "b": shard.name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        shard.write_bytes(bytes(8) + b"one")
        before = hash_weights(tmp_path)
        stray.write_bytes(bytes(8) + b"which nothing reads")
        assert hash_weights(tmp_path) == before
        shard.write_bytes(bytes(8) + b"two")
        assert hash_weights(tmp_path) != before
