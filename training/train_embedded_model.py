"""Make the embedded model, its draft model and its EAGLE heads from a seed.

    python training/train_embedded_model.py                  # about 14 minutes on one H200
    python training/train_embedded_model.py --stages evaluate,report

Writes pd/assets/embedded, embedded-draft, embedded-eagle and embedded-eagle3,
docs/embedded-model.json and the page made from it. Needs torch, numpy, tokenizers and safetensors,
and no network. Without a GPU it takes days. ``--smoke`` runs every line of it in two minutes, with
a useless result.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embedded.eagle import EagleHead
    from embedded.feed import Feed
    from embedded.model import Qwen3
    from embedded.training import Progress, Recipe
    from tokenizers import Tokenizer

_ROOT = Path(__file__).parents[1]
STAGES = ("model", "draft", "eagle", "eagle3", "deepen", "evaluate", "report")


def main() -> int:
    """Run the stages; each reads from disk what earlier ones wrote."""
    run = Run(_arguments())
    try:
        for stage in STAGES:
            if stage in run.args.stages:
                run.stage(stage)
    finally:
        run.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=_ROOT / "pd" / "assets")
    add("--report", type=Path, default=_ROOT / "docs" / "embedded-model.json")
    add("--stages", default=",".join(STAGES), help="comma-separated")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=7000, help="of the model")
    add("--draft-steps", type=int, default=3500)
    add("--eagle-steps", type=int, default=1500)
    add("--deepen-steps", type=int, default=300)
    add("--workers", type=int, help="processes that make batches")
    add("--commit", help="what the report names (default: asks git)")
    add("--smoke", action="store_true", help="few small steps, for trying it out")
    args = parser.parse_args()
    args.stages = args.stages.split(",")
    if unknown := set(args.stages) - set(STAGES):
        parser.error(f"unknown stage {unknown.pop()}; there are {', '.join(STAGES)}")
    if args.smoke:
        args.steps, args.draft_steps, args.eagle_steps, args.workers = 6, 4, 4, 1
        args.deepen_steps = 2
    return args


class Run:
    """The stages, with what they share: settings, the report, and processes that make batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from embedded import export, report, training

        self.args = args
        self._found = report.read(args.report) | {"seed": args.seed}
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokens = 4608 if args.smoke else training.TOKENS
        self._model_dir = args.output / export.EMBEDDED_DIR
        self._draft_dir = args.output / export.DRAFT_DIR
        self._eagle_dirs = {
            "eagle": args.output / export.EAGLE_DIR,
            "eagle3": args.output / export.EAGLE3_DIR,
        }
        self._feed: Feed | None = None

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def stage(self, name: str) -> None:
        """Run one stage and write the report as it is then."""
        import torch
        from embedded import report

        torch.manual_seed(self.args.seed)
        began = time.monotonic()
        getattr(self, name)()
        if name != "report":
            seconds = time.monotonic() - began
            print(f"{name}: {seconds:.1f} s", flush=True)
            self._found.setdefault("stages", {})[name] = {
                "seconds": round(seconds, 1),
                "command": " ".join(["python", *sys.argv]),
                "machine": self._machine(),
                "commit": self.args.commit or _commit(),
            }
        report.write(self._found, self.args.report)

    def report(self) -> None:
        """Do nothing, because every stage ends by writing the report."""

    def model(self) -> None:
        from embedded import export, vocabulary
        from embedded.model import EMBEDDED, Qwen3
        from embedded.training import Recipe

        tokenizer = vocabulary.train()
        model = Qwen3(EMBEDDED).to(self._device)
        recipe = Recipe(self.args.steps, self.args.seed, tokens=self._tokens)
        self._found["curve"] = self._train(model, recipe, tokenizer)
        self._found["tokens"] = recipe.steps * recipe.tokens
        export.save_qwen3(model, tokenizer, self._model_dir, drafts=False)
        self._describe(self._model_dir, model)

    def draft(self) -> None:
        from embedded import export
        from embedded.model import DRAFT, Qwen3
        from embedded.training import Recipe

        tokenizer = self._tokenizer()
        model = Qwen3(DRAFT).to(self._device)
        recipe = Recipe(self.args.draft_steps, self.args.seed + 1, tokens=self._tokens)
        self._found["draft_curve"] = self._train(model, recipe, tokenizer)
        export.save_qwen3(model, tokenizer, self._draft_dir, drafts=True)
        self._describe(self._draft_dir, model)

    def eagle(self) -> None:
        from embedded.eagle import Eagle1

        self._train_head("eagle", Eagle1(), self._eagle_recipe(2))

    def eagle3(self) -> None:
        from embedded import export
        from embedded.eagle import Eagle3, frequent_tokens

        head, recipe = Eagle3(), self._eagle_recipe(3)
        model = export.load_qwen3(self._model_dir)
        tokens = frequent_tokens(
            self._feeding(self._tokenizer()), recipe, head.shape.vocab, model.shape.vocab
        )
        head.start_from(model, tokens)
        self._train_head("eagle3", head, recipe)

    def deepen(self) -> None:
        from embedded import eagle, export

        for seed, name in enumerate(self._eagle_dirs, 4):
            head = export.load_eagle(self._eagle_dirs[name])
            steps = self.args.deepen_steps
            recipe = eagle.deep_recipe(steps, self.args.seed + seed, self._tokens // 2)
            self._train_head(name, head, recipe, eagle.DEEP)

    def _eagle_recipe(self, seed: int) -> Recipe:
        from embedded.eagle import CURRICULUM
        from embedded.training import Recipe

        return Recipe(
            self.args.eagle_steps,
            self.args.seed + seed,
            tokens=self._tokens // 2,
            curriculum=CURRICULUM,
        )

    def _train_head(
        self, name: str, head: EagleHead, recipe: Recipe, depth: int | None = None
    ) -> None:
        """Train a head, with ``depth`` drafts in a row if it goes on, and save it."""
        from embedded import export

        model = export.load_qwen3(self._model_dir).to(self._device)
        head = head.to(self._device)
        curve = self._train(head, recipe, self._tokenizer(), model, depth)
        self._found[f"{name}_curve" if depth is None else f"{name}_deep_curve"] = curve
        export.save_eagle(head, model.shape.vocab, self._eagle_dirs[name])
        self._describe(self._eagle_dirs[name], head)

    def evaluate(self) -> None:
        import torch
        from embedded import export, heldout, measure

        tokenizer = self._tokenizer()
        model = export.load_qwen3(self._model_dir).to(self._device)
        sets = heldout.evaluation_sets()
        if self.args.smoke:
            sets = {name: examples[:2] for name, examples in sets.items()}
        batch_tokens = 400_000 if self._device.type == "cuda" else 8_000
        scores, answers = measure.scores(model, tokenizer, sets, batch_tokens)
        self._found["scores"] = scores
        for dtype, table in scores.items():
            print(dtype, {name: share["share"] for name, share in table.items()}, flush=True)
        self._found["recall_by_depth"] = measure.recall_by_depth(answers)
        if not self.args.smoke:
            self._found["beyond"] = measure.beyond(model, tokenizer, batch_tokens)
        if all((place / export.WEIGHTS).exists() for place in self._eagle_dirs.values()):
            draft = export.load_qwen3(self._draft_dir).to(self._device)
            heads = {
                name: export.load_eagle(place).to(self._device)
                for name, place in self._eagle_dirs.items()
            }
            with torch.inference_mode():
                lengths = measure.drafters(model, draft, heads, answers)
            self._found["drafters"] = lengths
            print({name: table["all"] for name, table in lengths.items()}, flush=True)

    def _train(
        self,
        model: Any,
        recipe: Recipe,
        tokenizer: Tokenizer,
        target: Qwen3 | None = None,
        depth: int | None = None,
    ) -> list[list[float]]:
        """Train a model, or a head for ``target``; returns the curve."""
        from embedded import eagle, training

        feed = self._feeding(tokenizer)
        curve: list[list[float]] = []

        def log(progress: Progress) -> None:
            curve.append([round(value, 4) for value in progress])
            print(
                f"step {progress.step:5d}  {progress.seconds:6.1f} s, {progress.waited:.1f} s for "
                f"data  length {progress.length:4d}  loss {progress.loss:.4f}  "
                f"correct {progress.correct:.4f}",
                flush=True,
            )

        compiled = self._device.type == "cuda"
        if target is None:
            training.train(model, recipe, feed, compiled=compiled, log=log)
        else:
            deep = eagle.DEPTH if depth is None else depth
            eagle.train(model, target, recipe, feed, compiled=compiled, log=log, depth=deep)
        return curve

    def _feeding(self, tokenizer: Tokenizer) -> Feed:
        from embedded import training
        from embedded.feed import Feed

        if self._feed is None:
            self._feed = Feed(tokenizer, training.CHUNK, self.args.workers)
        return self._feed

    def _describe(self, directory: Path, model: Any) -> None:
        size = sum(path.stat().st_size for path in directory.iterdir())
        parameters = sum(weight.numel() for weight in model.parameters())
        self._found.setdefault("bytes", {})[directory.name] = size
        self._found.setdefault("parameters", {})[directory.name] = parameters
        print(f"{directory}: {size:,} bytes, {parameters:,} parameters", flush=True)

    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._model_dir / "tokenizer.json"))

    def _machine(self) -> str:
        import platform

        import torch

        is_gpu = self._device.type == "cuda"
        name = torch.cuda.get_device_name() if is_gpu else platform.machine()
        return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
