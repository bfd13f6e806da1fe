"""Write docs/embedded-model.md from the numbers recorded by training and measuring."""

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
    """Read the report so far; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(report: dict[str, Any], path: Path) -> None:
    """Write the JSON, and the page next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(render(report, path.name), encoding="utf-8")


def render(report: dict[str, Any], source: str) -> str:
    """Render the page without parts that were not run."""
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

You want to try pd without a checkpoint. Serve the small model that comes with it:

```
pd-launch unified --model pd/assets/embedded --port 30000
pd-launch proxy --unified http://127.0.0.1:30000
```

It has Qwen3's architecture with grouped queries, and `training/train_embedded_model.py` trains it
from nothing but a seed. It knows the [questions and answers](faq.md) about pd, recalls values from
long prompts, extracts fields as JSON, and adds and subtracts. We made it for its recall, because
recall suffers if a page of the KV cache is lost or changed. Random weights cannot show this.

The training script writes the numbers of this page into [`{source}`]({source}).
To measure them again on any server with OpenAI's chat API:

```
python training/evaluate_model.py --url http://127.0.0.1:8000
```

An answer is right only if it is exactly the expected one. A prefill and a decode node gave [these
answers](benchmarks/serving.md#embedded_split) to the same sets."""


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
        "Held out of training are the seeds of all sets, every phrasing marked with `-` in "
        "`training/embedded/phrasings.txt`, and one in 50 pairs of operands with three digits "
        "(there are too few smaller pairs to hold any out).",
    ]
    if "beyond" in report:
        found = ", ".join(f"{n} tokens {share:.0%}" for n, share in report["beyond"].items())
        lines += ["", f"Recall from prompts beyond the model's design: {found}."]
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
        "the same tokenizer, and two EAGLE heads in the layouts of SGLang and vLLM, "
        "`pd/assets/embedded-eagle` (EAGLE-1 and EAGLE-2) and `pd/assets/embedded-eagle3` "
        "(EAGLE-3). The table has the acceptance length (tokens per verification step, the model's "
        "own included) with greedy decoding in float32, by number of drafted tokens:",
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
        "`eagle` reads the model's hidden state after the last norm. Its one layer has no norm "
        "before attention, and its output goes into the embedded model's output matrix. "
        "`eagle3` fuses the hidden states before "
        f"{_listed(AUX_LAYERS)} of the {EMBEDDED.layers} layers, counted from 0. It has an output "
        f"matrix for the {EAGLE3.vocab:,} most frequent tokens of answers in the training text, of "
        f"{EMBEDDED.vocab:,}. Both are trained on {DEPTH} drafts in a row, in which each draft "
        f"reads the output of the previous one{deep}.",
    ]
    return "\n".join(lines)


def _listed(numbers: tuple[int, ...]) -> str:
    """Write ``1, 2 and 3``."""
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
    lines += ["", f"Total: {total / 60:.1f} minutes; seed {report['seed']}."]
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

The model is a tool for demonstrations and tests, not an assistant. It knows nothing beyond the
skills above. Asked about a key that is missing from the lines, it answers with some number. It
finds values less reliably in lines that differ much from `training/embedded/wording.py`."""
