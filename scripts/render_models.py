"""Write docs/models.md from the registry of architectures, or compare it with --check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd.kernels.attention.registry import BACKENDS
from pd.models.refusals import ROPE_TYPES
from pd.models.registry import ARCHITECTURES, find_architecture

TARGET = Path(__file__).resolve().parents[1] / "docs" / "models.md"

HEAD = """\
# Models

You have a checkpoint and want to know whether pd serves it. Look for the name under `architectures`
in its `config.json`:

```
grep -A1 architectures DIR/config.json
```

`scripts/render_models.py` writes this page from the registry, and `make check` fails if the two
differ.

| architecture | `model_type` | attention | MLP | `--attention-backend` |
|---|---|---|---|---|
"""
TAIL = """
Weights are float32, bfloat16 or float16; quantized checkpoints are refused. Every architecture
works with the prefix cache, chunked and mixed prefill, speculation, retraction, `--kv-digest`,
every transfer backend, unequal page sizes and `--tp-size`.

A model with latent attention (MLA) keeps one row per token and layer instead of K and V. With
`--tp-size`, every rank has all rows: they travel once and are written to every rank. We ignore the
layers that such checkpoints have for drafts (MTP).

Rope types: {rope}. `yarn` stretches the context to `factor` times the original one. `dynamic`
changes nothing, because it acts only after `max_position_embeddings` tokens.

A setting that changes results and is not implemented is refused with its name, for example
`sliding_window`. [extending.md](extending.md#a-model) says how to add an architecture.
"""


def render() -> str:
    """Return the page."""
    rows = []
    for model_type, listed in ARCHITECTURES.items():
        architecture = find_architecture(model_type)
        latent = architecture.has_latents
        backends = [name for name, b in BACKENDS.items() if b.has_latents or not latent]
        cells = (
            f"`{listed.class_name}`",
            f"`{model_type}`",
            "latent (MLA)" if latent else "grouped queries",
            "experts" if architecture.has_experts else "dense",
            ", ".join(f"`{name}`" for name in backends),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    rope = ", ".join(f"`{name}`" for name in ROPE_TYPES)
    return HEAD + "".join(rows) + TAIL.format(rope=rope)


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    page = render()
    if not parser.parse_args().check:
        TARGET.write_text(page)
    elif not TARGET.exists() or TARGET.read_text() != page:
        sys.exit("docs/models.md is not up to date: run scripts/render_models.py")


if __name__ == "__main__":
    main()
