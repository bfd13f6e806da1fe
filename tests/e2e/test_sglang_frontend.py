"""SGLang's own frontend language against pd: the results are those of plain requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster
from test_choices import OPTIONS, PROMPT, System, behind_proxy

from pd import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = Path(__file__).with_name("sglang_programs.py")
GREEDY = {"temperature": 0}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def frontend() -> str:
    program = os.environ.get("PD_TEST_SGLANG")
    if not program:
        pytest.skip(
            "SGLang's frontend is not installed: set PD_TEST_SGLANG to the program that "
            "`sh scripts/peer_environment.sh sglang .peers` prints, as make test-all does"
        )
    return program


def complete(system: System, prompt: str, tokens: int) -> str:
    sampling = GREEDY | {"max_new_tokens": tokens}
    text: str = system.choose(text=prompt, sampling_params=sampling)["text"]
    return text


@pytest.mark.parametrize("layout", ["split", "unified"])
def test_programs_of_sglangs_frontend_run(
    checkpoint: Callable[[str], Path], frontend: str, layout: str
) -> None:
    layouts: dict[str, Any] = {
        "split": {},
        "unified": {"prefill": 0, "decode": 0, "unified": 1},
    }
    with behind_proxy(Cluster(checkpoint("qwen3"), **layouts[layout])) as system:
        url = str(system.http.base_url)
        ran = subprocess.run(
            [frontend, str(PROGRAM), url, PROMPT, *OPTIONS],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        results = json.loads(ran.stdout.splitlines()[-1])
        assert results["generate"] == complete(system, PROMPT, 7)
        assert results["stream"] == complete(system, PROMPT, 9)
        assert results["batch"] == [complete(system, PROMPT, tokens) for tokens in range(1, 9)]
        assert [message["role"] for message in results["chat"][1]] == [
            "system",
            "user",
            "assistant",
        ]
        parts = [complete(system, f"{PROMPT}{number} ", 5) for number in range(3)]
        joined = PROMPT + " ".join(parts)
        assert results["branch"] == joined + complete(system, joined, 4)
        number, typed, value = results["constrain"]
        assert re.fullmatch("[0-9]{2}", number)
        assert typed in ("True", "False", "true", "false")
        assert set(json.loads(value)) == {"city", "old"}
        scored = system.choose(
            text=PROMPT,
            sampling_params=GREEDY | {"max_new_tokens": 5},
            return_logprob=True,
            logprob_start_len=0,
        )
        assert results["scored_stream"] == scored["text"]
        assert results["length"] == 5
        for name, entries in zip(("input", "output"), results["scores"], strict=True):
            expected = scored["meta_info"][f"{name}_token_logprobs"]
            assert [entry[1:] for entry in entries] == [entry[1:] for entry in expected]
            assert [entry[0] for entry in entries] == pytest.approx([e[0] for e in expected])
        # The frontend scores options over the tokens of prompt and option together.
        assert set(results["choose"].values()) <= set(OPTIONS)
        assert results["server"]["version"] == __version__
