"""Prose that quotes measured figures says what the result files say.

:data:`QUOTES` has each passage that quotes figures, as it must read by `benchmarks/results`. A
number with a unit of measurements (GB/s, %, ms, …) anywhere else in the documents, or in comments
and docstrings, is an error unless :data:`LIMITS` says what it is: a limit or a setting, not a
result. Pages that are written by a program (benchmarks.md, embedded-model.md) are checked by that.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = {"benchmarks.md", "embedded-model.md"}
MEASURED = re.compile(
    r"(?<![\w.])\d[\d,.]*(?: to \d[\d,.]*)? ?(?:GB/s|MB/s|%|ms\b|µs|tok/s|tokens/s|TFLOPS?)"
)


def rows(name: str, **chosen: object) -> list[dict[str, Any]]:
    """Rows of a result file with these values."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return [row for row in found if all(row.get(key) == value for key, value in chosen.items())]


def value(name: str, column: str, **chosen: object) -> float:
    """The column of the only row with these values. Raises ValueError if there is not one."""
    (row,) = rows(name, **chosen)
    return float(row[column])


def span(values: list[float]) -> str:
    """Smallest and largest, as whole numbers."""
    low, high = round(min(values)), round(max(values))
    return f"{low}" if low == high else f"{low} to {high}"


def _transfers() -> dict[str, str]:
    metric, work = "prefill, as the node says", "unloaded:32768"
    found = {}
    # The prefill node alone was measured once beside each split, in this order.
    alone = rows("split_gpu", system="prefill node alone", work=work, metric=metric)
    for backend, base in zip(("nvlink", "nixl"), alone, strict=True):
        split = value("split_gpu", "p50_ms", system=f"split, {backend}", work=work, metric=metric)
        found |= {backend: f"{split:,.0f}", f"{backend}_alone": f"{base['p50_ms']:,.0f}"}
    return found


def _blocks() -> dict[str, str]:
    sizes = {"page": 32768, "layers": 2 << 20, "slot": 128 << 20}
    found = {
        name: f"{value('nixl_blocks_gpu', 'gb_s', block_bytes=size):.0f}"
        for name, size in sizes.items()
    }
    many = [row for row in rows("nixl_blocks_gpu") if row["blocks"] > 512]
    return found | {
        "descriptor": span([row["write_ms"] / row["blocks"] * 1e3 for row in many]),
        "staged": f"{value('transfer_gpu', 'gb_s', backend='nixl'):.0f}",
    }


def _kernels() -> dict[str, str]:
    one, two = (
        {
            row["size"].split(" rows")[0]: row["us"]
            for row in rows("kernels_prompts_gpu")
            if row["size"].endswith(way)
        }
        for way in ("one kernel", "two")
    )
    linear = [r for r in rows("kernels_gpu", kernel="linear") if rows_of(r) <= 16]
    return {
        "gate_up": span([100 * (1 - one[size] / two[size]) for size in one]),
        "linear": span([max(100 * (row["us"] / row["torch_us"] - 1) for row in linear)]),
    }


def rows_of(row: dict[str, Any]) -> int:
    return int(row["size"].split(", ")[1].removesuffix(" rows"))


def _sending() -> str:
    """Percent by which a pass takes longer when KV leaves layer by layer."""
    layered = [row for row in rows("sending_gpu") if "by layers" in row["sent"]]
    return span([100 * row["more_ms"] / row["pass_ms"] for row in layered])


def _split() -> dict[str, str]:
    """Drafters in a running split: speed by none's, and milliseconds to the first two tokens."""
    name, heads = "speculation_split_gpu", ("eagle", "eagle3", "eagle3, tree")
    found = {}
    for streams in (1, 16):
        for drafter in ("ngram", "draft"):
            speedup = value(name, "speedup", drafter=drafter, streams=streams)
            found[f"{drafter}_{streams}"] = f"{speedup:.2f}"
        for token in ("first", "second"):
            none = value(name, f"{token}_ms", drafter="none", streams=streams)
            times = [value(name, f"{token}_ms", drafter=h, streams=streams) for h in heads]
            found |= {f"none_{token}_{streams}": f"{none:.0f}"}
            found |= {f"heads_{token}_{streams}": span(times)}
    return found


def _drafting() -> dict[str, str]:
    """By streams: percent of a trace of steps with drafts in which the GPU waited."""
    found = {}
    for streams in (1, 32):
        path = RESULTS / f"speculation_idle_{streams}_gpu.json"
        share = json.loads(path.read_text())["settings"]["idle_share"]
        found[f"idle_{streams}"] = f"{100 * share:.0f}"
    return found


def _mixed() -> dict[str, str]:
    """What steps with a part of a prompt beside 16 answers take, and a prompt alone."""
    name, part, more = "engine_mixed_gpu", 496, 1008
    mixed = value(name, "median_ms", work=f"mixed:16:{part}:8192")
    longer = value(name, "median_ms", work=f"mixed:16:{more}:8192")
    deep = value(name, "median_ms", work=f"mixed:16:{part}:30000")
    whole = 8192 / value(name, "median_ms", work="prefill:8192")
    return {
        "part": str(part),
        "mixed": f"{mixed:.0f}",
        "speed": f"{part / mixed:.0f}",
        "more": f"{more:,}",
        "longer": f"{longer:.0f}",
        "faster": f"{more / longer:.0f}",
        "deep": f"{deep:.0f}",
        "alone": f"{whole:.0f}",
    }


def _profiled() -> dict[str, str]:
    """Milliseconds of a step with a part of a prompt beside answers, and how many more percent a
    token's products and everything of its step take than in a long chunk."""
    part, chunk = (_parts(name) for name in ("mixed_profile_gpu", "mixed_profile_long_gpu"))
    deep = _parts("mixed_profile_deep_gpu")
    slower = (part["products"] / part["tokens"]) / (chunk["products"] / chunk["tokens"]) - 1
    names = ("step", "products", "attention", "idle")
    rest = part["step"] - sum(part[name] for name in names[1:])
    return {
        **{name: f"{part[name]:.1f}" for name in names},
        "rest": f"{rest:.1f}",
        "slower": f"{100 * slower:.0f}",
        "deep": f"{100 * deep['attention'] / deep['step']:.0f}",
        "deep_products": f"{deep['products']:.1f}",
    }


def _parts(name: str) -> dict[str, float]:
    """Milliseconds of a step by what it does, from a trace of ``mixed:B:N:P``, and its tokens."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    settings, found = report["settings"], {"products": 0.0, "attention": 0.0}
    for row in report["results"]:
        kernel = row["kernel"]
        if kernel == "paged_attention":
            found["attention"] += row["total_ms"]
        elif "nvjet" in kernel or kernel == "_gate_up_silu":
            found["products"] += row["total_ms"]
    _, answers, part, _ = settings["work"].split(":")
    steps = settings["steps"]
    return {
        **{what: total / steps for what, total in found.items()},
        "step": settings["traced_ms"] / steps,
        "idle": settings["idle_ms"] / steps,
        "tokens": float(answers) + float(part),
    }


def _idle() -> str:
    ways = [r["idle_core"] for r in rows("nixl_completion") if r["way"].startswith("notification")]
    return " to ".join(f"{100 * share:.0f} %" for share in sorted(ways))


def _progress_thread() -> str:
    """Percent of the rate that NIXL's progress thread costs."""
    note, thread = (
        value("nixl_completion", "gb_s", way=way) for way in ("note", "notification, thread")
    )
    return f"{100 * (1 - thread / note):.0f}"


@dataclass(frozen=True)
class Quote:
    """A passage of a file; white space and comment signs do not count."""

    file: str
    text: str


def quotes() -> list[Quote]:
    transfers, blocks, kernels = _transfers(), _blocks(), _kernels()
    page = "docs/transfer-backends.md"
    return [
        Quote(
            page,
            "the prefill of 32,768 tokens takes {nvlink} ms while it is sent over `nvlink` and "
            "{nvlink_alone} ms while nothing is, {nixl} ms over `nixl` and {nixl_alone} ms without "
            "(`split_gpu`".format(**transfers),
        ),
        Quote(
            page,
            "NIXL writes blocks of 32 KiB (a page of 16 tokens in one layer) at {page} GB/s, of "
            "2 MiB (the same page in all layers, which could not leave before the last one is "
            "computed) at {layers} GB/s, and of a buffer's 128 MiB at {slot} GB/s "
            "(`nixl_blocks_gpu`".format(**blocks),
        ),
        Quote(
            page,
            f"gathering and scattering leave {blocks['staged']} GB/s of that (`transfer_gpu`)",
        ),
        Quote(
            "docs/speculation.md",
            "one stream ran at {ngram_1} of the speed without drafts where n-grams were drafted "
            "and at {draft_1} with a draft model, 16 streams at {ngram_16} and "
            "{draft_16}".format(**_split()),
        ),
        Quote(
            "docs/speculation.md",
            "so that the GPU waits for {idle_1} and {idle_32} % of these traces".format(
                **_drafting()
            ),
        ),
        Quote(
            "docs/speculation.md",
            "the second token came {heads_second_1} ms after the first with one stream rather than "
            "{none_second_1} ms, and {heads_second_16} ms rather than {none_second_16} ms with 16, "
            "whose first token came after {heads_first_16} ms rather than {none_first_16} "
            "ms".format(**_split()),
        ),
        Quote(
            "docs/elastic.md",
            "a step with 16 answers and {part} tokens of a prompt at position 8,192 takes {mixed} "
            "ms, {speed} tokens a millisecond; one with {more} tokens takes {longer} ms, {faster} "
            "tokens a millisecond, and prompts alone are computed at {alone}. Deep in a prompt the "
            "loss is larger: at position 30,000 the step with {part} tokens takes {deep} "
            "ms".format(**_mixed()),
        ),
        Quote(
            "docs/elastic.md",
            "of the {step} ms of a step with 496 tokens, products with weights take {products}, "
            "attention {attention}, all other kernels {rest}, and for {idle} the GPU waits. The "
            "products take {slower} % longer for a token than in a chunk of eight thousand".format(
                **_profiled()
            ),
        ),
        Quote(
            "docs/elastic.md",
            "At position 30,000 the products take {deep_products} ms as before, and attention "
            "{deep} % of the step".format(**_profiled()),
        ),
        Quote(
            "pd/transfer/staged/manager.py",
            "a descriptor costs NIXL {descriptor} µs (``nixl_blocks_gpu``)".format(**blocks),
        ),
        Quote(
            "pd/transfer/staged/nixl.py",
            f"either takes D {_idle()} of a core with nothing to do, and the thread costs "
            f"{_progress_thread()} % of the rate (``nixl_completion``)",
        ),
        Quote(
            "pd/transfer/nvlink/sender.py",
            f"it takes {_sending()} % longer, whether groups of layers or one token of each were "
            "sent (``sending_gpu``)",
        ),
        Quote(
            "pd/kernels/gate_up_triton.py",
            f"{kernels['gate_up']} % less time than cuBLAS's product and that kernel after it "
            "(``kernels_prompts_gpu``)",
        ),
        Quote(
            "pd/kernels/linear_triton.py",
            f"at most {kernels['linear']} % so, and with some matrices only (``kernels_gpu``)",
        ),
    ]


# Numbers that are no results of ours, or of a look at a library that nobody repeats; by file.
LIMITS = {
    "docs/transfer-backends.md": [
        "A write to a killed peer ends within 50 ms",
        "an H200's for 50 ms: `nvidia-smi",
    ],
    "docs/speculation.md": [
        "embedded-model.md#drafters), within 5 %",
        "is cached it is the same within 2 %",
    ],
    "docs/elastic.md": [
        "first token is predicted within 5 % of the best, or 10 ms",
        "if that is less, but by 50 ms and 15 % at least",
        "when these were above 90 % and prompts waited",
        "would then be busier than 80 %",
    ],
    "docs/harness.md": ["multiples of 3000 ms", "allows 40 µs more for each token"],
    "pd/bench/compare.py": ["its 90 % interval"],
    "pd/bench/page/html.py": ["max-width: 100%"],
    "pd/bench/load/reception.py": ["a token every 7 ms"],
    "pd/bench/engine_roofline.py": ["800 TFLOP/s of bf16 products"],
    "pd/core/starvation.py": ["Takes about 7 µs for each thread"],
    "pd/commands/node.py": ["Python's default of 5 ms"],
    "pd/transfer/staged/nixl.py": [
        "A write to a killed peer ends with an error within 50 ms",
        "a buffer costs P 0.3 ms of Python",
        "the link needs 0.45 ms for 128 MiB",
        "each later one takes 10 to 30 ms",
    ],
    "pd/transfer/nvlink/sender.py": ["A GPU's links stay awake for 50 ms"],
    "benchmarks/sending.py": ["when it saw 390 GB/s"],
}


def prose(path: Path) -> str:
    """A page without code, or the comments and strings over several lines of a program; in one
    line."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    else:
        text = "\n".join(_comments(text))
    return " ".join(text.split())


def _comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#")
        elif token.type == tokenize.STRING and token.string.lstrip("rf").startswith('"""'):
            yield token.string


def files() -> list[Path]:
    pages = [page for page in ROOT.glob("docs/*.md") if page.name not in GENERATED]
    programs = [
        p
        for room in ("pd", "benchmarks", "scripts", "training")
        for p in ROOT.glob(f"{room}/**/*.py")
    ]
    own = Path(__file__).resolve()
    return sorted({ROOT / "README.md", *pages, *programs} - {own})


def problems(texts: dict[str, str], expected: list[Quote]) -> Iterator[str]:
    """Faults of files, given by name and :func:`prose`; a line each."""
    known = {name: list(passages) for name, passages in LIMITS.items()}
    for name, passages in LIMITS.items():
        for passage in passages:
            if passage not in texts.get(name, passage):
                yield f"{name} does not say {passage!r} any more: take it out of LIMITS"
    for quote in expected:
        known.setdefault(quote.file, []).append(quote.text)
        if quote.text not in texts.get(quote.file, ""):
            yield f"{quote.file} does not say what was measured: {quote.text!r}"
    for name, text in texts.items():
        for passage in known.get(name, ()):
            text = text.replace(passage, "")
        for found in MEASURED.finditer(text):
            around = text[max(0, found.start() - 40) : found.end() + 20]
            yield (
                f"{name} quotes {found.group()!r} ({around!r}): if it was measured, say from which "
                "result file in QUOTES of scripts/check_figures.py, otherwise name it in LIMITS"
            )


def main() -> int:
    texts = {str(path.relative_to(ROOT)): prose(path) for path in files()}
    found = list(problems(texts, quotes()))
    print("\n".join(found) or "figures in prose are those of the result files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
