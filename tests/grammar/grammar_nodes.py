"""Nodes of the model of random weights with constrained output."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Cluster, random_prompts, same
from counters import counter
from drafters import Oracle
from grammar_model import EOS, VOCAB_SIZE
from tiny import tiny_head

from pd import assembly
from pd.core.grammar import Grammar
from pd.grammar.compile_jobs import Vocabulary
from pd.grammar.compiler import CompileLimits
from pd.grammar.grammars import Grammars

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from cluster import Pending

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_algorithm": "ngram", "speculative_adaptive": "off"},
    "eagle": {"speculative_algorithm": "eagle", "speculative_adaptive": "off"},
    "tree": {
        "speculative_algorithm": "eagle",
        "speculative_adaptive": "off",
        "speculative_topk": 3,
        "speculative_num_draft_tokens": 6,
    },
    "half right": {"speculative_algorithm": "ngram", "speculative_adaptive": "off"},
    "draft": {"speculative_algorithm": "draft", "speculative_adaptive": "off"},
}

PROMPTS = list(random_prompts(9, [5, 40, 90]))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "ä", None, 1.5]}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": ["boolean", "null"]}},
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))


def _tagged(begin: str, schema: object) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return {"type": "tag", "begin": begin, "content": content, "end": "."}


def _tag_grammar(content: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


# Lists of two kinds of tags, whose strings are counted beside the grammar; and free text, in which
# each comma begins a number.
TAGS = _tag_grammar(
    {
        "type": "tags_with_separator",
        "tags": [_tagged("a", {"type": "string", "maxLength": 4}), _tagged("b", SCHEMA)],
        "separator": ";",
        "at_least_one": True,
    }
)
TRIGGERED = _tag_grammar(
    {
        "type": "triggered_tags",
        "triggers": [","],
        "tags": [_tagged(",", {"type": "integer", "minimum": 10, "maximum": 99})],
    }
)
# A token that is no text ends complete JSON; a comma and a colon end any.
STOP_ID, STOP_TEXTS = EOS - 1, (11, 25)
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"grammar": JSON},
    # The choices of this request soon need more memory than there is.
    "choices": {"grammar": JSON, "temperature": 1.0, "seed": 3, "n": 3},
    "choices at once": {
        "grammar": JSON,
        "temperature": 1.0,
        "seed": 13,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "min_tokens": 150,
    },
    "seeded": {"grammar": JSON, "temperature": 1.0, "seed": 1},
    "filtered": {"grammar": JSON, "temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40},
    "penalties": {
        "grammar": JSON,
        "temperature": 1.0,
        "seed": 4,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.2,
    },
    "bias": {"grammar": JSON, "logit_bias": {EOS: 50.0, 5: 10.0}},
    # No two of these capital letters follow each other.
    "limits": {
        "grammar": JSON,
        "temperature": 1.0,
        "seed": 17,
        "bad_sequences": tuple(itertools.product(range(32, 50), repeat=2)),
    },
    "log probabilities": {"grammar": JSON, "logprobs": True, "top_logprobs": 2},
    "min tokens": {"grammar": JSON, "temperature": 1.0, "seed": 5, "min_tokens": 150},
    "eos ignored": {"grammar": JSON, "temperature": 1.0, "seed": 6, "ignore_eos": True},
    "regex": {"grammar": Grammar("regex", "[ab]{2,9}(xy)*"), "temperature": 1.0, "seed": 7},
    "ebnf": {"grammar": Grammar("ebnf", 'root ::= "yes" | "no" root'), "temperature": 1.0},
    "tags": {"grammar": TAGS, "temperature": 1.0, "seed": 15},
    "triggers": {
        "grammar": TRIGGERED,
        "temperature": 1.0,
        "seed": 16,
        "max_tokens": 60,
        "logit_bias": {STOP_TEXTS[0]: 4.0},
    },
    "stop ids": {
        "grammar": JSON,
        "temperature": 1.0,
        "seed": 10,
        "stop_token_ids": (STOP_ID,),
        "logit_bias": {STOP_ID: 9.0},
    },
    "stop texts": {"grammar": JSON, "temperature": 1.0, "seed": 11, "stop_token_ids": STOP_TEXTS},
    "stop string": {"grammar": JSON, "temperature": 1.0, "seed": 12, "ends_after": STOP_TEXTS},
    "stop strings at once": {
        "grammar": JSON,
        "temperature": 1.0,
        "seed": 14,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "min_tokens": 5,
        "ends_after": STOP_TEXTS,
    },
    "greedy at once": {"grammar": JSON, "n": 2, "min_tokens": 150, "ends_after": STOP_TEXTS},
    "none": {"temperature": 1.0, "seed": 8, "max_tokens": 40},
    "short": {"grammar": JSON, "temperature": 1.0, "seed": 9, "max_tokens": 3},
    "one": {"grammar": JSON, "max_tokens": 1},
}

# The prompt that each feature's request has.
PROMPT_OF = dict(zip(FEATURES, itertools.cycle(PROMPTS)))
# Requests that ended, by feature.
Answers = dict[str, "Pending"]


def answers(cluster: Cluster, aborting: random.Random | None = None) -> Answers:
    """Return the answers to each feature's request, all sent at once.

    Args:
        aborting: send everything once more, and abort each of these requests at a random time.
    """
    asked: dict[str, Pending] = {}
    ended: list[Pending] = []
    for name, params in FEATURES.items():
        asked[name] = ask(cluster, PROMPT_OF[name], **params)
        if aborting is not None:
            ended.append(ask(cluster, PROMPT_OF[name], **params))
    if aborting is not None:
        aborting.shuffle(ended)
        for pending in ended:
            cluster.client.abort(pending)
            time.sleep(aborting.random() * 0.02)
    for pending in asked.values():
        pending.result()
    return asked


def same_answers(found: Answers, known: Answers, names: Iterable[str] = FEATURES) -> None:
    """Check that tokens, ends and log probabilities are equal for each of the features."""
    for name in names:
        same(found[name], known[name], name)


def half_right(known: Answers) -> Oracle:
    """Make a drafter with every second guess right, given the answers of another deployment."""
    oracle = Oracle(VOCAB_SIZE, 0.5)
    for name, pending in known.items():
        for tokens in pending.result():
            oracle.learn([*PROMPT_OF[name], *tokens])
    return oracle


@contextmanager
def grammars_of(
    model: Path, vocab_size: int = VOCAB_SIZE, eos: int = EOS, *, jump_forward: bool = False
) -> Iterator[Grammars]:
    """Make the grammars of a model's nodes."""
    vocabulary = Vocabulary(str(model / "tokenizer.json"), vocab_size, [eos])
    limits = CompileLimits(10.0, 1 << 30, 64 << 20)
    made = Grammars(vocabulary, limits, 1 << 26, jump_forward=jump_forward)
    close, made.close = made.close, lambda: None  # type: ignore[method-assign]
    yield made
    close()


@contextmanager
def use_grammars(grammars: Grammars) -> Iterator[None]:
    """Let nodes that start within the block share compiling processes, which start slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "make_grammars", lambda *_: grammars)
        yield


@contextmanager
def share_grammars(model: Path, *about: int, jump_forward: bool = False) -> Iterator[Grammars]:
    """Combine the two."""
    with grammars_of(model, *about, jump_forward=jump_forward) as made, use_grammars(made):
        yield made


def cluster_of(model: Path, kind: str, **settings: Any) -> Cluster:
    counts = (1, 1, 0) if kind == "split" else (0, 0, 1)
    if settings.get("speculative_algorithm") == "eagle":
        head = tiny_head("eagle3", vocab_size=VOCAB_SIZE)
        settings.setdefault("speculative_draft_model", head)
    if settings.get("speculative_algorithm") == "draft":
        settings.setdefault("speculative_draft_model", model)
    defaults = {"load_format": "dummy", "page_size": 4, "kv_cache_tokens": 8192}
    return Cluster(model, *counts, **defaults | settings)


def ask(cluster: Cluster, prompt: list[int], **params: Any) -> Pending:
    nodes = list(cluster.pair) if cluster.prefill else [cluster.unified[0]]
    defaults = {"max_tokens": 200, "ignore_eos": False, "stop_token_ids": ()}
    return cluster.client.generate(prompt, nodes, **defaults | params)


def check_answers(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    known: Answers,
    kind: str,
    drafter: str,
    settings: dict[str, Any],
    aborting: random.Random | None = None,
    *,
    is_short: bool = False,
) -> None:
    """Check that a deployment with a drafter gives the known answers of another one.

    Args:
        is_short: memory is too small for all answers, so some are retracted.
    """
    if drafter == "half right":
        monkeypatch.setattr(assembly, "make_drafter", lambda *_: half_right(known))
    with cluster_of(model, kind, **DRAFTERS[drafter] | settings) as cluster:
        retractions = 0.0
        for _ in range(3):
            same_answers(answers(cluster, aborting), known)
            retractions = sum(counter(node, "pd_retractions_total") for node in cluster.nodes)
            if retractions > 0 or not is_short:
                break  # otherwise steps and arrivals met so that memory sufficed
        cluster.wait_idle(30.0)
        assert (retractions > 0) == is_short
