"""Requests with every feature that has to survive a failover, each with its prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cluster import random_prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "grammar"))

from grammar_nodes import JSON

# Tokens of an answer. Behind a long prompt fewer are enough, since the fault comes early.
TOKENS, FEW_TOKENS = 120, 24
SHORT_PROMPT = 100
SAMPLED = {"temperature": 1.0, "sampling_seed": 11}
# Each with sampling parameters and other fields of the request.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "seeded": (SAMPLED | {"top_p": 0.9, "top_k": 50}, {}),
    "penalties": (SAMPLED | {"repetition_penalty": 1.2, "frequency_penalty": 0.4}, {}),
    "min tokens": (SAMPLED | {"min_new_tokens": 16, "ignore_eos": False}, {}),
    "three answers": (SAMPLED | {"n": 3}, {}),
    "log probabilities": (SAMPLED, {"return_logprob": True, "top_logprobs_num": 2}),
    "stop string": (SAMPLED, {}),  # one that the undisturbed text has near its end
    "grammar": (SAMPLED | {"json_schema": JSON.text, "ignore_eos": False}, {}),
}


def body_of(feature: str, length: int, stop: str = "") -> dict[str, Any]:
    params, fields = FEATURES[feature]
    (prompt,) = random_prompts(length, [length], vocab=400)
    # Where an answer may end before its last token, a fault has to come before that.
    may_end = "json_schema" in params or feature == "stop string"
    tokens = TOKENS if length < SHORT_PROMPT or may_end else FEW_TOKENS
    params = {"max_new_tokens": tokens, "ignore_eos": True} | params
    if stop:
        params |= {"stop": stop}
    return {"input_ids": prompt, "sampling_params": params} | fields
