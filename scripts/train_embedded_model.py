"""Make the embedded model, its draft model and its EAGLE head from nothing but a seed.

    python scripts/train_embedded_model.py                  # about 10 minutes on one H200
    python scripts/train_embedded_model.py --stages evaluate,report

Writes pd/assets/embedded, embedded-draft and embedded-eagle, docs/embedded-model.json and the page
made from it. Needs torch, numpy, tokenizers and safetensors, and no network. Without a GPU it works
as well, in days; ``--smoke`` runs every line of it in two minutes and ships nothing of use.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ROOT = Path(__file__).parents[1]
STAGES = ("model", "draft", "eagle", "evaluate", "report")


def main() -> int:
    """Run the stages; each reads from disk what earlier ones wrote."""
    args = _arguments()
    from embedded import report

    found = report.read(args.report)
    found["seed"] = args.seed
    for stage in STAGES:
        if stage in args.stages:
            _run(stage, args, found)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=_ROOT / "pd" / "assets")
    parser.add_argument("--report", type=Path, default=_ROOT / "docs" / "embedded-model.json")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5500, help="of the model")
    parser.add_argument("--draft-steps", type=int, default=3000)
    parser.add_argument("--eagle-steps", type=int, default=1500)
    parser.add_argument("--workers", type=int, help="processes that make batches")
    parser.add_argument("--commit", help="what the report names (default: asks git)")
    parser.add_argument("--smoke", action="store_true", help="few small steps, for trying it out")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"unknown stage {unknown.pop()}; there are {', '.join(STAGES)}")
    if args.smoke:
        args.steps, args.draft_steps, args.eagle_steps = 6, 4, 4
    return args


def _run(stage: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch
    from embedded import report

    torch.manual_seed(args.seed)
    began = time.monotonic()
    if stage != "report":
        globals()[f"_stage_{stage}"](args, found)
        found.setdefault("stages", {})[stage] = {
            "seconds": round(time.monotonic() - began, 1),
            "command": " ".join(["python", *sys.argv]),
            "machine": _machine(),
            "commit": args.commit or _commit(),
        }
        print(f"{stage}: {time.monotonic() - began:.1f} s", flush=True)
    report.write(found, args.report)


def _stage_model(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from embedded import export, vocabulary
    from embedded.model import EMBEDDED, Qwen3
    from embedded.training import Recipe

    tokenizer = vocabulary.train()
    model = Qwen3(EMBEDDED).to(_device())
    recipe = Recipe(args.steps, args.seed, tokens=_tokens(args))
    found["curve"] = _train(args, model, recipe, tokenizer)
    found["tokens"] = recipe.steps * recipe.tokens
    export.round_weights(model)
    directory = args.output / export.EMBEDDED_DIR
    export.save_qwen3(model, tokenizer, directory, drafts=False)
    _describe(directory, model, found)


def _stage_draft(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from embedded import export
    from embedded.model import DRAFT, Qwen3
    from embedded.training import Recipe

    tokenizer = _tokenizer(args)
    model = Qwen3(DRAFT).to(_device())
    recipe = Recipe(args.draft_steps, args.seed + 1, tokens=_tokens(args))
    found["draft_curve"] = _train(args, model, recipe, tokenizer)
    directory = args.output / export.DRAFT_DIR
    export.save_qwen3(model, tokenizer, directory, drafts=True)
    _describe(directory, model, found)


def _stage_eagle(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from embedded import eagle, export
    from embedded.training import Recipe

    model = export.load_qwen3(args.output / export.EMBEDDED_DIR).to(_device())
    model.requires_grad_(False)
    head = eagle.Eagle().to(_device())
    recipe = Recipe(
        args.eagle_steps, args.seed + 2, tokens=_tokens(args) // 2, curriculum=eagle.CURRICULUM
    )
    found["eagle_curve"] = _train(args, head, recipe, _tokenizer(args), target=model)
    directory = args.output / export.EAGLE_DIR
    export.save_eagle(head, model.shape.vocab, directory)
    _describe(directory, head, found)


def _stage_evaluate(args: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch
    from embedded import export, heldout, measure

    device, tokenizer = _device(), _tokenizer(args)
    model = export.load_qwen3(args.output / export.EMBEDDED_DIR).to(device)
    sets = heldout.evaluation_sets()
    if args.smoke:
        sets = {name: examples[:2] for name, examples in sets.items()}
    batch_tokens = 400_000 if device.type == "cuda" else 8_000
    found["scores"], answers = measure.scores(model, tokenizer, sets, batch_tokens)
    for dtype, table in found["scores"].items():
        print(dtype, {name: share["share"] for name, share in table.items()}, flush=True)
    found["recall_by_depth"] = measure.recall_by_depth(answers)
    if not args.smoke:
        found["beyond"] = measure.beyond(model, tokenizer, batch_tokens)
    if (args.output / export.EAGLE_DIR / export.WEIGHTS).exists():
        draft = export.load_qwen3(args.output / export.DRAFT_DIR).to(device)
        head = export.load_eagle(args.output / export.EAGLE_DIR).to(device)
        with torch.inference_mode():
            found["drafters"] = measure.drafters(model, draft, head, answers)
        print({name: table["all"] for name, table in found["drafters"].items()}, flush=True)


def _train(
    args: argparse.Namespace, model: Any, recipe: Any, tokenizer: Any, target: Any = None
) -> list[Any]:
    """Train with batches from processes of their own; returns the curve."""
    from embedded import eagle, training
    from embedded.feed import Feed

    curve: list[training.Progress] = []

    def log(progress: training.Progress) -> None:
        curve.append(progress)
        print(
            f"step {progress.step:5d}  {progress.seconds:6.1f} s  length {progress.length:4d}  "
            f"loss {progress.loss:.4f}  correct {progress.correct:.4f}",
            flush=True,
        )

    feed = Feed(tokenizer, training.CHUNK, 1 if args.smoke else args.workers)
    compiled = _device().type == "cuda"
    try:
        if target is None:
            training.train(model, recipe, feed, compiled=compiled, log=log)
        else:
            eagle.train(model, target, recipe, feed, compiled=compiled, log=log)
    finally:
        feed.close()
    return [list(progress) for progress in curve]


def _describe(directory: Path, model: Any, found: dict[str, Any]) -> None:
    size = sum(path.stat().st_size for path in directory.iterdir())
    found.setdefault("bytes", {})[directory.name] = size
    parameters = sum(weight.numel() for weight in model.parameters())
    found.setdefault("parameters", {})[directory.name] = parameters
    print(f"{directory}: {size:,} bytes, {parameters:,} parameters", flush=True)


def _tokens(args: argparse.Namespace) -> int:
    from embedded.training import TOKENS

    return 4608 if args.smoke else TOKENS


def _tokenizer(args: argparse.Namespace) -> Any:
    from embedded.export import EMBEDDED_DIR
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(args.output / EMBEDDED_DIR / "tokenizer.json"))


def _device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _machine() -> str:
    import platform

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
