"""What ``generation_config.json`` recommends for sampling, and what of it counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pd.core.errors import UsageError
from pd.core.sampling_params import SamplingDefaults
from pd.models.generation_config import read_sampling_defaults

if TYPE_CHECKING:
    from pathlib import Path

# As Qwen3 ships it.
QWEN3 = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def write(directory: Path, content: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_auto_takes_what_counts_and_none_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, "auto") == SamplingDefaults()
    write(tmp_path, QWEN3 | {"min_p": None, "repetition_penalty": 1})
    assert read_sampling_defaults(tmp_path, "none") == SamplingDefaults()
    found = read_sampling_defaults(tmp_path, "auto")
    assert found == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"
    assert str(SamplingDefaults()) == "none"


def test_a_model_that_does_not_sample_still_recommends_its_temperature(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": False, "temperature": 0.9, "top_k": -1})
    assert read_sampling_defaults(tmp_path, "auto") == SamplingDefaults(temperature=0.9)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": -1}, "temperature must be between 0.0 and 100.0, not -1.0"),
        ({"top_p": 0}, "top_p must be above 0, not 0.0"),
        ({"top_k": 2.5}, "top_k must be an integer, not 2.5"),
        ({"top_k": True}, "top_k must be an integer, not True"),
        ({"min_p": float("nan")}, "min_p must be between 0.0 and 1.0, not nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between 0.01 and 100.0, not 0.0"),
        ([], "does not hold a JSON object"),
    ],
)
def test_a_value_that_cannot_be_names_the_file_and_the_way_out(
    tmp_path: Path, content: object, complaint: str
) -> None:
    write(tmp_path, content)
    with pytest.raises(UsageError, match=r"generation_config\.json") as raised:
        read_sampling_defaults(tmp_path, "auto")
    assert complaint in raised.value.message
    assert content == [] or "--generation-config none" in raised.value.message
    assert read_sampling_defaults(tmp_path, "none") == SamplingDefaults()
