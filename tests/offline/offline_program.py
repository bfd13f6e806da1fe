"""Programs with an offline model, which tests start as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from offline_settings import SETTINGS

from pd import LLM, SamplingParams
from pd.core.errors import NodeFailedError
from pd.embedded import EMBEDDED_MODEL
from pd.util.starvation import RUN_DELAY

# The first answer shows that the batch is under way. Nobody waits for the others.
BATCH = [SamplingParams(max_tokens=1)]
BATCH += [SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0)] * 4
left: LLM
PROMPTS = ["The prefill node"] * len(BATCH)


class Bar:
    """A progress bar that calls a function when the first prompt is done."""

    def __init__(self, on_first: Any) -> None:
        self._on_first = on_first

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def update(self) -> None:
        self._on_first()


def list_children() -> list[int]:
    """Return the ids of this process's children that have not ended."""
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return children


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_idle(llm: LLM) -> None:
    """Wait until the engine has no request, for at most two seconds."""
    deadline = time.monotonic() + 2.0
    while True:
        (worker,) = llm._get("/workers")["workers"]
        if worker["running"] == 0:
            return
        assert time.monotonic() < deadline, worker
        time.sleep(0.05)


def interrupt() -> None:
    """Wait for Ctrl-C in the middle of a batch, use the model again, lose the engine, and close."""
    llm = LLM(EMBEDDED_MODEL, **SETTINGS)
    # It is for the engine process only.
    assert "torch" not in sys.modules
    (engine,) = list_children()
    began = 0.0

    def announce() -> None:
        nonlocal began
        began = time.monotonic()
        say("under way", engine)

    try:
        llm.generate(PROMPTS, BATCH, use_tqdm=lambda **_: Bar(announce))
    except KeyboardInterrupt:
        say("interrupted", RUN_DELAY.measure_growth(began))
    wait_idle(llm)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    (output,) = llm.generate("The prefill node", sampling, use_tqdm=False)
    say("answered", len(output.outputs[0].token_ids))

    def kill_engine(**_: object) -> Bar:
        return Bar(lambda: os.kill(engine, signal.SIGKILL))

    try:
        llm.generate(PROMPTS, BATCH, use_tqdm=kill_engine)
    except NodeFailedError as error:
        say("lost", error.message)
    llm.close()
    say("children", *list_children())
    deadline = time.monotonic() + 10
    while list_threads() and time.monotonic() < deadline:  # they have been told to end
        time.sleep(0.01)
    say("threads", *list_threads())
    say("directories", *Path(os.environ["TMPDIR"]).glob("pd-*"))


def list_threads() -> list[str]:
    """The last one measures the run delay of any process of pd."""
    names = {thread.name for thread in threading.enumerate()}
    return sorted(names - {"MainThread", "pd-run-delay"})


def close() -> None:
    """Close the model in order."""
    with LLM(EMBEDDED_MODEL, **SETTINGS) as llm:
        say("ready", *list_children())
        llm.generate("Hello", use_tqdm=False)
    say("children", *list_children())


def forked() -> None:
    """Close the model while a fork of this process lives, and show how the engine ended."""
    with LLM(EMBEDDED_MODEL, **SETTINGS) as llm:
        child = os.fork()
        if child == 0:
            signal.pause()
        engine = llm._connection.engine
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert engine is not None
    say("status", engine._process.returncode)


def leave() -> None:
    """End without closing the model, as vLLM's examples do."""
    global left
    left = LLM(EMBEDDED_MODEL, **SETTINGS)
    say("ready", *list_children())
    left.generate("Hello", use_tqdm=False)


def drop() -> None:
    """Drop the model, and show that its engine has ended."""
    llm = LLM(EMBEDDED_MODEL, **SETTINGS)
    say("ready", *list_children())
    del llm
    say("children", *list_children())


def load() -> None:
    """Load a model."""
    say("loading")
    LLM(EMBEDDED_MODEL, **SETTINGS)
    say("loaded")


def wait_forever() -> None:
    """Wait in the middle of a batch."""
    llm = LLM(EMBEDDED_MODEL, **SETTINGS)
    (engine,) = list_children()
    llm.generate(PROMPTS, BATCH, use_tqdm=lambda **_: Bar(lambda: say("under way", engine)))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
