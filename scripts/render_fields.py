"""Write docs/fields.md from the table of known fields, or compare it with --check."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

# Models of requests add their places to the table.
from pd.proxy.requests import (
    admin,
    anthropic,
    batches,
    chat,
    known_fields,
    native,
    ollama,
    openai,
    responses,
    score,
    tokens,
)
from pd.proxy.requests import output_grammar as structured
from pd.proxy.requests.known_fields import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    KNOWN,
    OBEYED,
    OTHER_APIS,
    FieldPlace,
)
from pd.proxy.requests.request_model import RequestModel

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "fields.md"
MODELS = (
    admin,
    anthropic,
    batches,
    chat,
    native,
    ollama,
    openai,
    responses,
    score,
    structured,
    tokens,
)

HEAD = """\
# Fields of requests

You have a request for OpenAI's API, vLLM or SGLang, and want to know which fields pd obeys. A
running proxy also lists its fields, with types and bounds:

```
curl http://127.0.0.1:8000/openapi.json
```

[api.md](api.md) explains the common ones. `scripts/render_fields.py` writes this page from the
proxy's own table, and `make check` fails if the two differ.

## Where each field goes

"Yes" means that the field is obeyed, and "no effect" that it is accepted. A name is the one to use
there. An empty cell means that the field makes no sense there. A field in the wrong place is a 400
that names the right place or name, unless its value is null or asks for nothing. Fields unknown to
all three systems are ignored. `/invocations` takes the fields of the API that it stands for.

"""
NOWHERE = """
## Supported nowhere

A request with one of these fields is a 400, unless its value is null or passes:

| field | passes | message of `/v1/completions` |
|---|---|---|
"""
COLUMNS = {
    "`/v1/completions`": FieldPlace((COMPLETIONS,)),
    "`/v1/chat/completions`": FieldPlace((CHAT,)),
    "`/generate`": FieldPlace((GENERATE,)),
    "its `sampling_params`": FieldPlace((GENERATE,), "sampling_params"),
    "`/tokenize`": FieldPlace((known_fields.TOKENIZE,)),
    "`/detokenize`": FieldPlace((known_fields.DETOKENIZE,)),
}
OTHER_HEAD = """
## Other APIs

The fields of Anthropic's, Ollama's and OpenAI's newer API, and of SGLang's scores, in the same
words. "Refused" is a 400 unless the value is null or asks for nothing, and "ignored" is a field
unknown to that API. [apis.md](apis.md) says more about single fields.

"""
OTHER_COLUMNS = {
    "`/v1/responses`": FieldPlace((known_fields.RESPONSES,)),
    "`/v1/messages`": FieldPlace((known_fields.MESSAGES,)),
    "`…/count_tokens`": FieldPlace((known_fields.COUNT_TOKENS,)),
    "`/api/chat`": FieldPlace((known_fields.OLLAMA_CHAT,)),
    "`/api/generate`": FieldPlace((known_fields.OLLAMA_GENERATE,)),
    "their `options`": FieldPlace(
        (known_fields.OLLAMA_CHAT, known_fields.OLLAMA_GENERATE), "options"
    ),
    "`/v1/score`": FieldPlace((known_fields.SCORE,)),
}
OBJECTS = [
    FieldPlace((COMPLETIONS, CHAT), name) for name in ("stream_options", "structured_outputs")
]
_CALLED = re.compile(r"is called ([\w.]+) here(, and belongs at the top level of the request)?")
_WITHIN = re.compile(r"belongs in (\w+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page would change")
    page = render()
    if parser.parse_args().check:
        if TARGET.read_text() != page:
            print(f"{TARGET.relative_to(ROOT)} is not what {Path(__file__).name} writes: run it")
            return 1
        return 0
    TARGET.write_text(page)
    return 0


def render() -> str:
    """Render the page."""
    obeyed = frozenset().union(
        *(names for place, names in OBEYED.items() if OTHER_APIS.isdisjoint(place.endpoints))
    )
    lines = [f"| field | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in KNOWN:
        if name in obeyed:
            cells = [cell(place, name) for place in COLUMNS.values()]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    beside = [
        f"`{place.inside}` of `/v1/*` has {_listed(sorted(OBEYED[place]))}." for place in OBJECTS
    ]
    completions = FieldPlace((COMPLETIONS,))
    nowhere = [
        f"| `{name}` | {passes(name)} | {known_fields.explain_refusal(completions, name)} |"
        for name in KNOWN
        if name not in obeyed
    ]
    parts = [HEAD, "\n".join(lines), "\n\n", "\n".join(beside), "\n", OTHER_HEAD]
    parts += ["\n".join(render_others()), "\n", NOWHERE, "\n".join(nowhere)]
    return "".join(parts) + "\n"


def render_others() -> list[str]:
    """Render the lines of the table of other APIs: the fields that at least one of them takes."""
    places = OTHER_COLUMNS.values()
    taken = frozenset().union(*(OBEYED[place] for place in places))
    names = [name for name in KNOWN if name in taken] + sorted(taken - KNOWN.keys())
    lines = [f"| field | {' | '.join(OTHER_COLUMNS)} |", "|---" * (1 + len(places)) + "|"]
    for name in names:
        cells = [other_cell(place, name) for place in places]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def other_cell(place: FieldPlace, name: str) -> str:
    """Say in a word or two how an endpoint of another API treats a field."""
    if name not in OBEYED[place] and name not in KNOWN:
        return "ignored"
    return cell(place, name) if _is_short(place, name) else "refused"


def _is_short(place: FieldPlace, name: str) -> bool:
    advice = "" if name in OBEYED[place] else known_fields.explain_refusal(place, name)
    return not advice or bool(_CALLED.fullmatch(advice) or _WITHIN.fullmatch(advice))


def list_described(words: str) -> dict[FieldPlace, frozenset[str]]:
    """List the fields of each place whose description has these words in any case."""
    found, models = {}, [RequestModel]
    while models:
        model = models.pop()
        models += model.__subclasses__()
        if model.place is not None:
            fields = model.model_fields.items()
            found[model.place] = frozenset(
                field.alias or name
                for name, field in fields
                if words in (field.description or "").lower()
            )
    return found


def cell(place: FieldPlace, name: str) -> str:
    """Say in a few words how an endpoint treats a field."""
    if name in OBEYED[place]:
        if name in REFUSED[place]:
            return "refused"
        return "no effect" if name in WITHOUT_EFFECT[place] else "yes"
    advice = known_fields.explain_refusal(place, name)
    if called := _CALLED.fullmatch(advice):
        return f"`{called[1]}`" + (" at the top level" if called[2] else "")
    if within := _WITHIN.fullmatch(advice):
        return f"in `{within[1]}`"
    if advice.startswith("belongs at the top level"):
        return "at the top level"
    return "" if advice.startswith(("is for ", "is not ")) else advice


def passes(name: str) -> str:
    """List the values that pass in addition to null."""
    return ", ".join(f"`{json.dumps(value)}`" for value in KNOWN[name])


WITHOUT_EFFECT = list_described("without effect")
# Fields that a model checks itself.
REFUSED = list_described("refused, because")


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
