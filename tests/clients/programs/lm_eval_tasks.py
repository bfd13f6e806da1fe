"""lm-eval's models for servers with OpenAI's API: `python lm_eval_tasks.py URL MODEL_DIRECTORY`.

The tasks have their questions here, and the tokenizer is a directory, so nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": f"What is {a} + {b}?", "answer": str(a + b), "choices": [str(a + b), "pears"]}
    for a, b in ((12, 30), (5, 6), (40, 2), (70, 11))
]


def make_task(name: str, data: Path, **more: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        **more,
    }


def evaluate(kind: str, task: dict[str, Any], address: str, model: str, **more: Any) -> Any:
    """Run a task. Returns its results."""
    arguments = {
        "model": "embedded",
        "base_url": address,
        "tokenizer": model,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(),
        bootstrap_iters=0,
        **more,
    )
    return found["results"][task["task"]]


def main(url: str, model: str) -> None:
    data = Path("questions.jsonl")
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    generate = make_task(
        "sums",
        data,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 32, "temperature": 0},
        filter_list=[
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(\d+)(?!.*\d)"},
                    {"function": "take_first"},
                ],
            }
        ],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    chat = f"{url}/v1/chat/completions"
    results = evaluate("local-chat-completions", generate, chat, model, apply_chat_template=True)
    assert results["exact_match,number"] == 1.0, results
    completions = f"{url}/v1/completions"
    results = evaluate("local-completions", generate, completions, model, apply_chat_template=True)
    assert results["exact_match,number"] == 1.0, results

    # Choices are compared by the log probabilities of the prompt (`echo`, `logprobs`).
    choose = make_task(
        "choose",
        data,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target=0,
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    results = evaluate("local-completions", choose, completions, model, apply_chat_template=True)
    assert results["acc,none"] == 1.0, results


if __name__ == "__main__":
    main(*sys.argv[1:])
