"""Writes docs/embedded-model.md from the numbers that training and measuring recorded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from embedded.eagle import AUX_LAYERS, DEEP, DEPTH
from embedded.heldout import BARS
from embedded.measure import DEPTHS, DTYPES
from embedded.model import EAGLE3, EMBEDDED

if TYPE_CHECKING:
    from pathlib import Path

_SKILLS = {
    "recall-2k": "recall of one value among other lines, prompts up to 2,000 tokens",
    "recall-4k": "the same, prompts of 2,500 to 4,000 tokens",
    "multi-turn": "second question about the same lines, prompts up to 3,500 tokens",
    "extraction": "fields of a sentence as JSON, without a grammar",
    "arithmetic": "sums and differences of numbers with up to three digits",
    "faq": "questions of [faq.md](faq.md) in phrasings never trained on",
}


_STAGES = ("model", "draft", "eagle", "eagle3", "deepen", "evaluate")


def read(path: Path) -> dict[str, Any]:
    """The report so far; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(report: dict[str, Any], path: Path) -> None:
    """Write the JSON, and the page beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(render(report, path.name), encoding="utf-8")


def render(report: dict[str, Any], source: str) -> str:
    """The page; parts that were not run are left out."""
    sections = [_introduction(source)]
    for key, section in (
        ("scores", _scores),
        ("recall_by_depth", _depths),
        ("drafters", _drafters),
        ("stages", _stages),
        ("bytes", _files),
    ):
        if key in report:
            sections.append(section(report))
    return "\n\n".join([*sections, _LIMITS]) + "\n"


def _introduction(source: str) -> str:
    return f"""\
# The embedded model

`pd/assets/embedded` is a small language model that comes with pd: Qwen3's architecture with grouped
queries, trained from nothing but a seed by `training/train_embedded_model.py`. It knows the
[questions and answers](faq.md) about this system, recalls values from long prompts, extracts fields
as JSON and adds and subtracts. Its recall is why it exists: it drops when a page of the KV cache is
lost or changed, which random weights cannot show.

This page is generated from [`{source}`]({source}), which the training script
writes. To measure again, against any server that speaks OpenAI's chat API:

```
python training/evaluate_model.py --url http://127.0.0.1:8000
```

Every example is judged right only if the answer is exactly the expected one. What a prefill and a
decode node made of the same sets is in [benchmarks.md](benchmarks.md#embedded_split)."""


def _scores(report: dict[str, Any]) -> str:
    lines = ["## Scores", "", "| skill | bar | " + " | ".join(DTYPES) + " |"]
    lines.append("|---|---|" + "---|" * len(DTYPES))
    scores = report["scores"]
    for name, text in _SKILLS.items():
        cells = []
        for dtype in DTYPES:
            found = scores[dtype][name]
            mark = "" if found["share"] >= BARS[name] else " **(missed)**"
            cells.append(f"{found['share']:.1%} ({found['right']}/{found['total']}){mark}")
        lines.append(f"| `{name}`: {text} | {BARS[name]:.0%} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Held out are: seeds of all sets; one in 50 pairs of operands of which one has three "
        "digits (smaller pairs are so few that all were trained on); every phrasing marked with "
        "`-` in `training/embedded/phrasings.txt`.",
    ]
    if "beyond" in report:
        found = ", ".join(f"{n} tokens {share:.0%}" for n, share in report["beyond"].items())
        lines += ["", f"Recall from longer prompts than the model was made for: {found}."]
    return "\n".join(lines)


def _depths(report: dict[str, Any]) -> str:
    table = report["recall_by_depth"]
    depths = sorted({depth for row in table.values() for depth in row})
    lines = [
        "## Recall by length and depth",
        "",
        "Share of right answers in float32. Depth 0 is the first line, 1 the last.",
        "",
        "| prompt up to | " + " | ".join(depths) + " |",
        "|---|" + "---|" * len(depths),
    ]
    for length, row in sorted(table.items(), key=lambda item: int(item[0])):
        cells = [f"{row[d]:.0%}" if d in row else "" for d in depths]
        lines.append(f"| {int(length):,} tokens | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _drafters(report: dict[str, Any]) -> str:
    lines = [
        "## Drafters",
        "",
        "For speculative decoding: `pd/assets/embedded-draft`, a model of two small layers with "
        "the same tokenizer, and two EAGLE heads in the layouts that SGLang and vLLM read, "
        "`pd/assets/embedded-eagle` (EAGLE-1 and EAGLE-2) and `pd/assets/embedded-eagle3` "
        "(EAGLE-3). Acceptance length (tokens per verification step, the model's own among them) "
        "with greedy decoding in float32, by number of drafted tokens:",
        "",
        "| drafter | set | " + " | ".join(str(d) for d in DEPTHS) + " |",
        "|---|---|" + "---|" * len(DEPTHS),
    ]
    deep = f", and at the end on {DEEP}" if "deepen" in report.get("stages", {}) else ""
    for drafter, table in report["drafters"].items():
        for name in (*_SKILLS, "all"):
            if name in table:
                cells = [f"{table[name][str(d)]:.2f}" for d in DEPTHS]
                lines.append(f"| {drafter} | {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "`eagle` reads the model's hidden state after the last norm; its one layer has no norm "
        "before attention, and the embedded model's output matrix reads its output as it is. "
        "`eagle3` fuses the hidden states before "
        f"{_listed(AUX_LAYERS)} of the {EMBEDDED.layers} layers, counted from 0, and has an "
        f"output matrix for the {EAGLE3.vocab:,} tokens that answers in the training text have "
        f"most often, of {EMBEDDED.vocab:,}. Both are trained on {DEPTH} drafts in a row, of which "
        f"each but the first reads the output of the one before{deep}.",
    ]
    return "\n".join(lines)


def _listed(numbers: tuple[int, ...]) -> str:
    """``1, 2 and 3``."""
    *some, last = map(str, numbers)
    return f"{', '.join(some)} and {last}"


def _stages(report: dict[str, Any]) -> str:
    lines = [
        "## How it was made",
        "",
        "| stage | seconds | command, machine, commit |",
        "|---|---|---|",
    ]
    for name in (name for name in _STAGES if name in report["stages"]):
        stage = report["stages"][name]
        where = f"`{stage['command']}`; {stage['machine']}; commit `{stage['commit'][:12]}`"
        lines.append(f"| {name} | {stage['seconds']:.0f} | {where} |")
    total = sum(stage["seconds"] for stage in report["stages"].values())
    lines += ["", f"In all {total / 60:.1f} minutes; seed {report['seed']}."]
    if "tokens" in report:
        lines[-1] += f" The model saw {report['tokens'] / 1e9:.2f} billion tokens."
    return "\n".join(lines)


def _files(report: dict[str, Any]) -> str:
    lines = ["## Files", "", "| directory | bytes | parameters |", "|---|---|---|"]
    for name, size in sorted(report["bytes"].items()):
        lines.append(f"| `pd/assets/{name}` | {size:,} | {report['parameters'][name]:,} |")
    return "\n".join(lines)


_LIMITS = """\
## Limits

It is a tool for demonstrations and tests, not an assistant. It knows nothing beyond the skills
above, answers a question about a key that is not in the lines with some number, and in lines of
quite another form than those of `training/embedded/wording.py` it finds values less reliably."""
