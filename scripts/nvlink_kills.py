"""Kill the decode node again and again while KV travels to it.

    python scripts/nvlink_kills.py --output FILE

There are a prefill node, a decode node and a proxy. The checkpoint has KV of Llama-3.1-8B's shape
(32 layers, 8 heads of 128, bfloat16) but hardly any weights, so nodes with large pools start within
seconds. Clients repeat long prompts, cached by the prefill node but not by the decode node, so
nearly all of the time goes into pushes. At a random moment, while the prefill node reports
hand-offs, the decode node is killed (SIGKILL) and restarted at once. It must get a pool of the same
size. Two such pools do not fit its GPU, so this works only if the prefill node has given up its
mapping of the old one.

After each restart a request must succeed, on the original prefill process. Kills continue until
enough have hit a push, by the prefill node's log: it noticed `noticed_s` after the kill, had
`transfers` to push or being pushed, and `stores` launched on its GPU but not complete. `lost`
requests failed until the node was back, most of them several times. The exit status is 1 if any
check fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from checkpoints import write_tokenizer  # noqa: E402
from processes import Process, free_port, is_idle, wait_ready, wait_until  # noqa: E402

VOCAB_SIZE = 512
OUTPUT_TOKENS = 2
# KV heads, layers, width and hidden size, context.
SHAPES = {"8b": (8, 32, 128, 256, 40960), "tiny": (2, 2, 8, 32, 2048)}
# Sizes relative to the decode node's cache: the prefill node's cache, and all prompts together.
_PREFILL_POOL, _PROMPTS = 1.2, 1.1
_UNMAPPED = re.compile(
    r"^([0-9-]+ [0-9:]+,[0-9]+) .*unmapped the pool of \S+ after ([0-9.]+) s; "
    r"(\d+) transfers were under way, (\d+) stores$",
    re.MULTILINE,
)


def write_model(shape: str, directory: Path) -> Path:
    """Write ``config.json`` and a tokenizer; weights are dummies."""
    heads, layers, width, hidden, context = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 254,
        "eos_token_id": 255,
        "tie_word_embeddings": False,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def make_prompts(lengths: tuple[int, int], tokens: int, rng: random.Random) -> list[bytes]:
    """Make requests with ``tokens`` prompt tokens in all. No two of them share a page."""
    bodies: list[bytes] = []
    while tokens > 0:
        length = rng.randint(*lengths)
        prompt = [len(bodies), *(rng.randrange(250) for _ in range(length - 1))]
        params = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        bodies.append(json.dumps({"input_ids": prompt, "sampling_params": params}).encode())
        tokens -= length
    return bodies


def ask(client: httpx.Client, body: bytes) -> str | None:
    """Send a request; the error, or None if it was answered."""
    try:
        answer = client.post("/generate", content=body)
    except httpx.HTTPError as error:
        return repr(error)
    if answer.status_code != 200:
        return answer.text
    tokens = answer.json()["output_ids"]
    return None if len(tokens) == OUTPUT_TOKENS else f"{len(tokens)} tokens: {answer.text}"


class Load:
    """Clients that send the prompts in turn all the time, whatever happens to their requests."""

    def __init__(self, client: httpx.Client, clients: int, bodies: list[bytes]) -> None:
        self._client = client
        self._bodies = itertools.cycle(bodies)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.in_flight = self.succeeded = self.failed = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                body = next(self._bodies)
                self.in_flight += 1
            good = ask(self._client, body) is None
            with self._lock:
                self.in_flight -= 1
                self.succeeded += good
                self.failed += not good
            if not good:
                self._over.wait(0.2)  # nobody can serve while the decode node starts


@dataclass
class Unmapped:
    """The prefill node's log line about the end of one mapping.

    Attributes:
        noticed: when it was to end, seconds since the epoch.
        seconds: that it took to drain and unmap.
        transfers: given to it to push and not complete then.
        stores: launched and not complete then.
    """

    noticed: float
    seconds: float
    transfers: int
    stores: int


class Trial:
    """The processes, and the checks after each kill."""

    prefill: Process
    decode: Process
    proxy: Process

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self._args, self._directory = args, directory
        self._rng = random.Random(args.seed)
        self._processes: list[Process] = []
        self.kills: list[dict[str, Any]] = []

    def start(self) -> None:
        """Start the processes and wait until they can serve."""
        args = self._args
        model = write_model(args.shape, self._directory / "model")
        flags = ["--model", str(model), "--load-format", "dummy"]
        flags += ["--max-running-requests", str(args.clients)]  # few graphs to capture
        flags += ["--transfer-backend", args.transfer_backend]
        pool = int(args.kv_cache_tokens * _PREFILL_POOL)
        prefill = ["--kv-cache-tokens", str(pool), "--bootstrap-port", str(free_port())]
        prefill += ["--port", str(free_port())]
        self.prefill = self._process("prefill", *prefill, "--device", args.prefill_device, *flags)
        decode = ["--kv-cache-tokens", str(args.kv_cache_tokens), "--device", args.decode_device]
        decode += ["--port", str(free_port())]
        self.decode = self._process("decode", *decode, *flags)
        workers = ["--prefill", self.prefill.url, "--decode", self.decode.url]
        self.proxy = self._process("proxy", "--port", str(free_port()), *workers)
        wait_ready(self.proxy, [self.prefill, self.decode], 120)
        self._instance = self.prefill.server_info()["instance_id"]
        self._pages = self.decode.server_info()["pages"]["total"]

    def _process(self, role: str, *flags: str) -> Process:
        process = Process(role, *flags, log=self._directory / f"{role}.log")
        self._processes.append(process)
        return process

    def run(self) -> None:
        """Run all kills under load; ``kills`` has the observations of each."""
        args = self._args
        tokens = int(args.kv_cache_tokens * _PROMPTS)
        self._bodies = make_prompts((args.min_prompt, args.max_prompt), tokens, self._rng)
        headers = {"content-type": "application/json"}
        self._client = httpx.Client(base_url=self.proxy.url, headers=headers, timeout=60)
        for body in self._bodies:  # into the prefill node's cache
            assert (error := ask(self._client, body)) is None, error
        load = Load(self._client, args.clients, self._bodies)
        try:
            while self.hits() < args.kills:
                tried = len(self.kills)
                assert tried < 3 * args.kills, f"only {self.hits()} of {tried} kills hit a push"
                self.kills.append(self._kill(tried + 1, load))
        finally:
            load.stop()
        for node in (self.prefill, self.decode):
            wait_until(lambda n=node: is_idle(n.server_info()), 30, node.server_info)
        print(f"requests: {load.succeeded} succeeded, {load.failed} lost with a decode node")

    def hits(self) -> int:
        """Count the kills during a running store; all of them if no log names stores."""
        return sum(kill.get("stores", 1) > 0 for kill in self.kills)

    def _kill(self, number: int, load: Load) -> dict[str, Any]:
        before = load.failed
        wait_until(lambda: load.in_flight > 0, 10)
        time.sleep(self._rng.uniform(*self._args.run_seconds))
        self._await_hand_off()
        in_flight, at = load.in_flight, time.time()
        self.decode.kill()
        began = time.monotonic()
        self.decode.restart()
        started = time.monotonic() - began
        pages = self.decode.server_info()["pages"]["total"]
        assert pages == self._pages, f"a pool of {pages} pages, not {self._pages}"
        wait_ready(self.proxy, [self.prefill, self.decode], 60)
        self._succeeds()
        recovered = time.monotonic() - began
        assert self.prefill.child.poll() is None, "the prefill node ended"
        assert self.prefill.server_info()["instance_id"] == self._instance
        seen = {"kill": number, "in_flight": in_flight}
        if self._args.transfer_backend == "nvlink":
            wait_until(lambda: len(self.unmapped()) >= number, 5, "not unmapped")
            *earlier, end = self.unmapped()
            assert len(earlier) == number - 1, "a mapping was given up without a kill"
            assert end.noticed > at - 0.1, "the mapping ended before the kill"
            gone = end.noticed - at + end.seconds
            assert gone <= 1.0, f"a pool was unmapped only {gone:.3f} s after the kill"
            seen |= {
                "transfers": end.transfers,
                "stores": end.stores,
                "noticed_s": round(end.noticed - at, 3),
                "unmapped_s": end.seconds,
            }
        seen |= {
            "lost": load.failed - before,
            "restart_s": round(started, 2),
            "recovered_s": round(recovered, 2),
            "pool_tokens": pages * self.decode.server_info()["page_size"],
        }
        print(seen, flush=True)
        return seen

    def _await_hand_off(self) -> None:
        """Return when several prompts are on their way at once, or some are and that takes long."""
        began = time.monotonic()
        with httpx.Client(base_url=self.prefill.url, timeout=10) as client:
            while True:
                handed_over = client.get("/server_info").json()["queues"]["in_flight"]
                waited = time.monotonic() - began
                if handed_over > 1 or (handed_over and waited > 3):
                    return
                assert waited < 10, "no prompt was handed over"

    def _succeeds(self) -> None:
        """Send requests until one succeeds: the proxy may have to find the node again."""
        errors: list[str | None] = []

        def answered() -> bool:
            errors.append(ask(self._client, self._rng.choice(self._bodies)))
            return errors[-1] is None

        wait_until(answered, 30, lambda: errors[-1])

    def unmapped(self) -> list[Unmapped]:
        """List the mappings closed by the prefill node, in order."""
        found = []
        for at, *numbers in _UNMAPPED.findall((self._directory / "prefill.log").read_text()):
            written = datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()
            seconds = float(numbers[0])
            found.append(Unmapped(written - seconds, seconds, int(numbers[1]), int(numbers[2])))
        return found

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, help="result file (JSON)")
    add("--kills", type=int, default=20, help="that must hit a push")
    add("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    add("--shape", choices=SHAPES, default="8b")
    add("--transfer-backend", default="nvlink")
    add("--prefill-device", default="cuda:0")
    add("--decode-device", default="", help="default: the second GPU, or the same if there is one")
    add("--kv-cache-tokens", type=int, default=0, help="default: more than half of a GPU's memory")
    add("--min-prompt", type=int, default=24576)
    add("--max-prompt", type=int, default=40000)
    add("--clients", type=int, default=12)
    add("--run-seconds", type=float, nargs=2, default=(0.3, 1.5), help="of load before a kill")
    add("--logs", type=Path, help="keep the processes' logs in this directory")
    args = parser.parse_args(arguments)
    if not args.decode_device:
        args.decode_device = "cuda:1" if len(gpus()) > 1 else "cuda:0"
    if not args.kv_cache_tokens:
        # 98 GiB of an H200's 140, or 49 if both nodes share it.
        shared = args.decode_device == args.prefill_device
        args.kv_cache_tokens = 400_000 if shared else 800_000
    return args


def commit() -> str:
    """Return the commit of the working tree, or PD_COMMIT if there is no repository."""
    if "PD_COMMIT" in os.environ:
        return os.environ["PD_COMMIT"]
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def gpus() -> list[str]:
    """Name and driver of each GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError:
        return []
    return listed.stdout.strip().splitlines()


def attempt(args: argparse.Namespace, directory: Path) -> tuple[Trial, str]:
    """Run all kills; returns their errors. Every process has ended afterwards."""
    trial = Trial(args, directory)
    error = ""
    try:
        trial.start()
        trial.run()
    except (AssertionError, httpx.HTTPError, subprocess.SubprocessError) as failure:
        error = str(failure) or repr(failure)
    finally:
        trial.stop()
    return trial, error


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    print(f"seed {args.seed}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pd-kills-") as name:
        trial, error = attempt(args, Path(name))
        for log in Path(name).glob("*.log"):
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / log.name).write_bytes(log.read_bytes())
            elif error:
                print(f"--- {log.name}", log.read_text()[-3000:], sep="\n", file=sys.stderr)
    document = {
        "benchmark": "nvlink_kills",
        "command": " ".join(["python", "scripts/nvlink_kills.py", *(arguments or sys.argv[1:])]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"gpus": gpus(), "cores": os.cpu_count()},
        "settings": {k: v for k, v in vars(args).items() if k not in ("output", "logs")},
        "passed": not error,
        "error": error,
        "seconds": round(time.monotonic() - began, 1),
        "hits": trial.hits(),
        "results": trial.kills,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'passed' if not error else 'FAILED: ' + error}; {len(trial.kills)} kills", flush=True)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
