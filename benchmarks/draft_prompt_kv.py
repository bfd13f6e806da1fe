"""Compare two places to compute a draft model's KV of a prompt: prefill node and decode node.

    python benchmarks/draft_prompt_kv.py --output FILE
    python benchmarks/draft_prompt_kv.py --model llama-3.1-8b --draft llama-3.2-1b --device cuda

Both ways consist of the same passes, which one idle node runs in turn. Figures are medians.

- On the prefill node, the model and then the draft model compute every chunk of a prompt. That
  takes `both_ms` instead of `prompt_ms` (`delay_rate`), delays the first token and uses part of
  the node's capacity. The draft model's planes travel with the pages, so a prompt's KV grows by
  `added_bytes_rate`.
- On the decode node, the draft model computes the prompt while another node prefills it. Nothing
  waits for it unless `catch_up_ms` exceeds `prompt_ms` (`catch_up_rate` is their ratio). Running
  sequences are delayed in `pieces` steps: a step of `batch` sequences takes `step_beside_ms` with
  a piece of the prompt and `step_ms` without.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from pd.bench.report import write_report  # noqa: E402
from pd.bench.shapes import SHAPES, model_directory  # noqa: E402
from pd.core.config import NodeConfig  # noqa: E402
from pd.engine.forward_item import ForwardItem  # noqa: E402
from pd.engine.sampling_state import Draw  # noqa: E402
from pd.launch import NodeServer  # noqa: E402
from pd.models.checkpoint import find_checkpoint  # noqa: E402
from pd.speculative.costs import make_greedy_state  # noqa: E402
from pd.speculative.draft_model import CATCH_UP_TOKENS, ModelDrafter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.engine.model_runner import ModelRunner

STEP_CONTEXT = 1024


class Passes:
    """Forward passes of a node's two models, each of which is waited for.

    Args:
        chunk: tokens of a prompt that the model computes in a pass.
        batch: sequences of a step.
    """

    def __init__(self, server: NodeServer, chunk: int, batch: int) -> None:
        drafter: Any = server.node.core.drafter
        assert isinstance(drafter, ModelDrafter)
        self.engine = server.node.engine
        self.draft: ModelRunner = drafter._runner
        self._chunk, self._batch = chunk, batch
        self._rng = np.random.default_rng(0)
        self.engine.activate()

    @property
    def added_bytes(self) -> float:
        """Return the size of the draft model's KV of a token as a share of the model's."""
        sizes = [
            sum(plane.buffer.nbytes for plane in runner.pool.planes) / runner.pool.num_pages
            for runner in (self.engine.runner, self.draft)
        ]
        return sizes[1] / sizes[0]

    def prompt(self, tokens: int, *, by_both: bool) -> None:
        """Compute a prompt in chunks, with the model or with both models."""
        for start in range(0, tokens, self._chunk):
            stop = min(tokens, start + self._chunk)
            (item,) = self._items(1, start, stop)
            logits = self.engine.runner.forward([item])
            if by_both:
                self.draft.forward([item])
        self._wait(logits, 1)

    def catch_up(self, tokens: int) -> None:
        """Compute a prompt in pieces with the draft model."""
        for start in range(0, tokens, CATCH_UP_TOKENS):
            (item,) = self._items(1, start, min(tokens, start + CATCH_UP_TOKENS))
            logits = self.draft.forward([item])
        self._wait(logits, 1)

    def step(self, piece: int) -> None:
        """Compute a step of the batch after the draft model has computed ``piece`` tokens of a
        prompt."""
        if piece:
            self.draft.forward(self._items(1, STEP_CONTEXT, STEP_CONTEXT + piece))
        logits = self.engine.runner.forward(
            self._items(self._batch, STEP_CONTEXT, STEP_CONTEXT + 1)
        )
        self._wait(logits, self._batch)

    def _items(self, count: int, start: int, stop: int) -> list[ForwardItem]:
        """Make works for tokens ``start`` to ``stop`` of so many sequences, in pages of their
        own."""
        runner = self.engine.runner
        each = -(-stop // runner.pool.page_size)
        pages = np.arange(each * count, dtype=np.int32).reshape(count, each)
        ids = self._rng.integers(0, runner.model.config.vocab_size, stop - start, dtype=np.int32)
        return [ForwardItem(ids, start, table, 1) for table in pages]

    def _wait(self, logits: Any, count: int) -> None:
        sampler = self.engine.sampler
        draws = [Draw(make_greedy_state(self.engine))] * count
        sampler.launch(logits, sampler.prepare(draws)).result()


def measure(passes: Passes, prompts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return median milliseconds of every kind of pass, by the length of the prompt."""
    rows = []
    for tokens in prompts:
        piece = min(tokens, CATCH_UP_TOKENS)
        works: dict[str, Callable[[], None]] = {
            "prompt_ms": lambda n=tokens: passes.prompt(n, by_both=False),
            "both_ms": lambda n=tokens: passes.prompt(n, by_both=True),
            "catch_up_ms": lambda n=tokens: passes.catch_up(n),
            "step_ms": lambda: passes.step(0),
            "step_beside_ms": lambda n=piece: passes.step(n),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for turn in range(rounds + 1):
            for name, work in works.items():
                began = time.perf_counter()
                work()
                # The first round warms up.
                if turn:
                    seconds[name].append(time.perf_counter() - began)
        times = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
        row = {"prompt": f"{tokens} tokens", **times, "pieces": -(-tokens // CATCH_UP_TOKENS)}
        row["delay_rate"] = times["both_ms"] / times["prompt_ms"] - 1
        row["catch_up_rate"] = times["catch_up_ms"] / times["prompt_ms"]
        row["added_bytes_rate"] = passes.added_bytes
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Start a node, measure its passes, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="embedded", help=f"DIR or {', '.join(SHAPES)}")
    parser.add_argument("--draft", default=str(ROOT / "pd/assets/embedded-draft"), metavar="DIR")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 3584])
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a pass of a prompt")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    least = max(*args.prompts, args.batch * (STEP_CONTEXT + 64), STEP_CONTEXT + CATCH_UP_TOKENS)
    server = NodeServer(
        NodeConfig(
            role="unified",
            model=find_checkpoint(model_directory(args.model)),
            load_format="dummy" if args.model in SHAPES else "auto",
            device=args.device,
            kv_cache_tokens=least + 1024,
            speculative_algorithm="draft",
            speculative_draft_model=find_checkpoint(model_directory(args.draft)),
        )
    )
    server.start()
    try:
        rows = measure(Passes(server, args.chunk, args.batch), args.prompts, args.rounds)
    finally:
        server.stop()
    if args.output is not None:
        command = shlex.join(["python", "benchmarks/draft_prompt_kv.py", *sys.argv[1:]])
        settings = {"model": args.model, "draft": Path(args.draft).name, "batch": args.batch}
        settings |= {"chunk": args.chunk, "device": args.device}
        write_report(args.output, command, rows, measured=["pd"], settings=settings)


if __name__ == "__main__":
    main()
