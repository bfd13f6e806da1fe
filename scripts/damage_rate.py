"""Measure how often one damaged byte of KV changes an answer, and that `--kv-digest` finds it.

Recall prompts go through a prefill and a decode node of the embedded model (float32, CPU) over the
`fake` backend, which flips every bit of one byte. We compare each answer with that of the same
prompt undamaged. The place is random (page, layer, K or V, head and dimension), in one of these
areas: anywhere; the token of a digit that the answer repeats; there, the byte with sign and
exponent; and of these, only V of the layer and head with which this model carries digits. With
`--kv-digest` the same damage must fail every request.

    python scripts/damage_rate.py --output benchmarks/results/damage_rate.json
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "training")]

from embedded.heldout import SEED, Example, recall_examples  # noqa: E402
from embedded.text import Message, render  # noqa: E402

from pd.bench.report import write_report  # noqa: E402
from pd.core.config import NodeConfig  # noqa: E402
from pd.embedded import EMBEDDED_MODEL  # noqa: E402
from pd.launch import NodeServer  # noqa: E402
from pd.proxy.config import ProxyConfig  # noqa: E402
from pd.proxy.server import ProxyThread  # noqa: E402

ANYWHERE, DIGIT, EXPONENT = "anywhere", "a digit", "a digit, sign and exponent"
CARRIER = "a digit, sign and exponent, where it is carried"
WHERE = (ANYWHERE, DIGIT, EXPONENT, CARRIER)
# Where the embedded model carries digits, found by trying all; head 0.
CARRIER_LAYER = 2
PROMPT_TOKENS = 400
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Damage:
    """One byte, as a rule of the `fake` backend's scripts names it."""

    token: int
    layer: int
    part: str
    byte: int


class Pair:
    """A prefill and a decode node in this process, with a proxy.

    Args:
        damages: damage of each request in order; None leaves it intact.
    """

    def __init__(self, directory: Path, damages: list[Damage | None], *, digest: bool) -> None:
        rules = [
            {"do": "corrupt", "rooms": number, **vars(damage)}
            for number, damage in enumerate(damages, start=1)
            if damage is not None
        ]
        script = directory / "script.json"
        script.write_text(json.dumps({"rules": rules}))
        settings: dict[str, Any] = {
            "model": EMBEDDED_MODEL,
            "device": "cpu",
            "dtype": "float32",
            "kv_cache_tokens": 8192,
            "transfer_backend": "fake",
            "fake_script": script,
            "kv_digest": digest,
        }
        self._nodes = [NodeServer(NodeConfig(role=role, **settings)) for role in _ROLES]
        for node in self._nodes:
            node.start()
        urls = {role: [node.url] for role, node in zip(_ROLES, self._nodes, strict=True)}
        # Failover would answer in spite of damage that is noticed.
        self._proxy = ProxyThread(ProxyConfig(**urls, port=0, failover="off"))

    def __enter__(self) -> Pair:
        self._proxy.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._proxy.stop()
        for node in self._nodes:
            node.stop()

    def ask(self, example: Example) -> httpx.Response:
        """Ask the last question of a conversation, with nothing cached from earlier requests."""
        body = {
            "messages": [message._asdict() for message in _messages(example)],
            "temperature": 0,
            "max_tokens": 32,
            "cache_salt": secrets.token_hex(8),
        }
        return httpx.post(f"{self._proxy.url}/v1/chat/completions", json=body, timeout=300)


_ROLES = ("prefill", "decode")


def _messages(example: Example) -> list[Message]:
    return [*example.before, Message("user", example.turns[-1].question)]


def _answer(response: httpx.Response) -> str:
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


class Places:
    """Draws where to damage a prompt."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
        config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
        self._layers = int(config["num_hidden_layers"])
        self._head = int(config["head_dim"])
        self._floats = int(config["num_key_value_heads"]) * self._head

    def draw(self, example: Example, where: str) -> Damage:
        encoding = self._tokenizer.encode(render(_messages(example)), add_special_tokens=False)
        rng = self._rng
        token = rng.randrange(len(encoding.ids))
        if where != ANYWHERE:
            token = self._digit(example, encoding)
        number = rng.randrange(self._floats)
        byte = rng.randrange(_FLOAT_BYTES)
        if where in (EXPONENT, CARRIER):
            byte = _FLOAT_BYTES - 1
        layer, part = rng.randrange(self._layers), rng.choice("kv")
        if where == CARRIER:
            number, layer, part = rng.randrange(self._head), CARRIER_LAYER, "v"
        return Damage(token, layer, part, _FLOAT_BYTES * number + byte)

    def _digit(self, example: Example, encoding: Any) -> int:
        """Return the token of one digit of the requested value."""
        prompt = render(_messages(example))
        value = example.turns[-1].answer.removesuffix(".").split()[-1]
        place = prompt.index(value) + self._rng.randrange(len(value))
        token = encoding.char_to_token(place)
        assert token is not None
        return int(token)


def measure(prompts: int, seed: int, directory: Path) -> list[dict[str, Any]]:
    """Measure one row for each of :data:`WHERE`."""
    examples = recall_examples(PROMPT_TOKENS, prompts)
    places = Places(random.Random(seed))
    damages = {where: [places.draw(example, where) for example in examples] for where in WHERE}
    order: list[Damage | None] = [None] * prompts
    for where in WHERE:
        order += damages[where]
    with Pair(directory, order, digest=False) as pair:
        intact = [_answer(pair.ask(example)) for example in examples]
        answers = {where: [_answer(pair.ask(example)) for example in examples] for where in WHERE}
    with Pair(directory, order[prompts:], digest=True) as pair:
        found = {where: [pair.ask(example) for example in examples] for where in WHERE}
    return [_row(where, intact, answers[where], found[where]) for where in WHERE]


def _row(
    where: str, intact: list[str], answers: list[str], found: list[httpx.Response]
) -> dict[str, Any]:
    differing = sum(a != b for a, b in zip(answers, intact, strict=True))
    refused = sum(r.status_code == 502 and "damaged on its way" in r.text for r in found)
    return {
        "damage": where,
        "prompts": len(intact),
        "other_answers": differing,
        "other_answers_rate": differing / len(intact),
        "noticed_by_digest": refused,
        "noticed_by_digest_rate": refused / len(intact),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="for each kind of place")
    parser.add_argument("--seed", type=int, default=SEED, help="of the places")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(args.prompts, args.seed, Path(directory))
    for row in rows:
        print(
            f"{row['damage']:48} {row['prompts']} prompts: "
            f"{row['other_answers_rate']:.1%} other answers, "
            f"{row['noticed_by_digest_rate']:.1%} noticed by the digest"
        )
    if args.output:
        command = "python " + " ".join(sys.argv)
        write_report(args.output, command, rows, measured=["pd", "scripts"])
    return 0 if all(row["noticed_by_digest_rate"] == 1.0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
