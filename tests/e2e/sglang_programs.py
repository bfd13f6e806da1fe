"""Programs in SGLang's frontend language. Prints their results as JSON.

This runs in an environment of its own (scripts/peer_environment.sh), without pd:

    PYTHON tests/e2e/sglang_programs.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl

METHODS = {
    "token_length_normalized": sgl.token_length_normalized,
    "greedy_token": sgl.greedy_token_selection,
    "unconditional_likelihood": sgl.unconditional_likelihood_normalized,
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["here", "there"]}, "old": {"type": "boolean"}},
    "required": ["city", "old"],
    "additionalProperties": False,
}


@sgl.function
def generate(s: Any, prompt: str, tokens: int) -> None:
    s += prompt + sgl.gen("answer", max_tokens=tokens, temperature=0)


@sgl.function
def chat(s: Any, question: str) -> None:
    s += sgl.system("the house")
    with s.user():
        s += question
    s += sgl.assistant(sgl.gen("answer", max_tokens=6, temperature=0))


@sgl.function
def choose(s: Any, prompt: str, options: list[str], method: str) -> None:
    s += prompt
    s += sgl.select("choice", options, choices_method=METHODS[method])


@sgl.function
def branch(s: Any, prompt: str) -> None:
    s += prompt
    branches = s.fork(3)
    for number, one in enumerate(branches):
        one += f"{number} " + sgl.gen("part", max_tokens=5, temperature=0)
    s += " ".join(one["part"] for one in branches)
    s += sgl.gen("end", max_tokens=4, temperature=0)


@sgl.function
def constrain(s: Any) -> None:
    s += "the " + sgl.gen("number", regex=r"[0-9]{2}") + " "
    s += sgl.gen("typed", dtype=bool, max_tokens=8) + " "
    s += sgl.gen("object", json_schema=json.dumps(SCHEMA), max_tokens=64)


@sgl.function
def score(s: Any, prompt: str) -> None:
    s += prompt
    s += sgl.gen(
        "answer",
        max_tokens=5,
        temperature=0,
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
        return_text_in_logprobs=True,
    )


def main(url: str, prompt: str, options: list[str]) -> dict[str, Any]:
    backend = sgl.RuntimeEndpoint(url)
    sgl.set_default_backend(backend)
    results: dict[str, Any] = {"generate": generate.run(prompt=prompt, tokens=7)["answer"]}
    state = chat.run(question=prompt)
    results["chat"] = [state["answer"], state.messages()]
    results["choose"] = {
        method: choose.run(prompt=prompt, options=options, method=method)["choice"]
        for method in METHODS
    }
    state = branch.run(prompt=prompt)
    results["branch"] = state.text()
    state = constrain.run()
    results["constrain"] = [state[name] for name in ("number", "typed", "object")]
    state = generate.run(prompt=prompt, tokens=9, stream=True)
    results["stream"] = "".join(state.text_iter("answer"))
    state = score.run(prompt=prompt, stream=True)
    results["scored_stream"] = "".join(state.text_iter("answer"))
    meta = score.run(prompt=prompt).get_meta_info("answer")
    results["scores"] = [meta["input_token_logprobs"], meta["output_token_logprobs"]]
    results["length"] = meta["output_token_logprobs_length"]
    batch = generate.run_batch(
        [{"prompt": prompt, "tokens": tokens} for tokens in range(1, 9)], num_threads=4
    )
    results["batch"] = [state["answer"] for state in batch]
    sgl.flush_cache(backend)
    results["server"] = sgl.get_server_info(backend)
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3:])))
