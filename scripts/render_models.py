"""Write docs/models.md from the registry of architectures, or compare it with --check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pd.kernels.attention.registry import BACKENDS
from pd.models.refusals import ROPE_TYPES
from pd.models.registry import ARCHITECTURES, find_architecture

if TYPE_CHECKING:
    from pd.models.architecture import Architecture

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
Weights are float32, bfloat16, float16 or [fp8](#fp8). Every architecture
works with the prefix cache, chunked and mixed prefill, speculation, retraction, `--kv-digest`,
every transfer backend, unequal page sizes and `--tp-size`. Every mixture of experts works with
[`--ep-size`](gpu.md#several-gpus-for-one-node), in every format of weights.

A model with latent attention (MLA) keeps one row per token and layer instead of K and V. With
`--tp-size`, every rank has all rows: they travel once and are written to every rank. Decode steps
attend to the rows themselves. On a GPU, chunks of 256 and more tokens expand the rows that they see
to K and V of every head, because that takes a third of the operations.

Mistral, Mixtral and Qwen checkpoints may have sliding windows, in all layers or in some. They need
`triton`, which `auto` then chooses on a GPU, or `torch`; `flashinfer` is refused. If about half of
the layers have a window, as in gpt-oss, the cache frees their pages once no window reaches them
([how](steps.md#pages-of-sliding-windows)), and a hand-off sends only what later tokens see. For
other models the cache keeps all tokens.

gpt-oss has windows in every other layer, and attention sinks: learned scores that join the softmax
of each head. Its experts have biases and a clamped activation. They may be in MXFP4
(`quant_method: mxfp4`), as OpenAI publishes them. A GPU keeps them in four bits, and a CPU
dequantizes them when it loads them. With `--tp-size`, the experts' width has to be a multiple of 32
on every rank; `--ep-size` keeps experts whole. `--quantization fp8` is refused.

GLM-4.5 to 4.7 (`glm4_moe`) rotate a part of each head (`partial_rotary_factor`), and have the
router and the shared experts of DeepSeek-V3.

Checkpoints of DeepSeek-V3, DeepSeek-R1 and these GLM models have a layer for drafts (MTP). It is
loaded only with `--speculative-algorithm mtp` ([speculation.md](speculation.md#mtp-layers)).

Phi-3 and Phi-4 (`phi3`) are served unless they have `longrope`, as Phi-3-mini-128k and
Phi-4-mini do. Their checkpoints cannot be in fp8, but `--quantization fp8` converts them.

Rope types: {rope}. `yarn` stretches the context to `factor` times the original one. `dynamic`
changes nothing, because it acts only after `max_position_embeddings` tokens.

## fp8

Weights of a checkpoint may be in fp8 (`float8_e4m3fn`). GPUs need tensor cores for fp8 (compute
capability 8.9 or later); older ones refuse such weights. These formats are known by
`quantization_config` in `config.json`:

| `quant_method` | scales of weights | scales of inputs |
|---|---|---|
| `fp8` with `weight_block_size` | per block of 128 by 128 | per token and 128 inputs |
| `fp8` | per weight or row | per token, or `static` |
| `compressed-tensors` | `tensor`, `channel`, `block` | `token`, `group`, or static `tensor` |
| `modelopt`, also in `hf_quant_config.json` | per weight or row | static, or per token |

The first one is that of DeepSeek and Qwen3. With `scale_fmt: ue8m0` its scales are powers of two.

Other formats are refused by name, and so are dynamic scales for all tokens of a step, because a
token would depend on its neighbours. A weight is quantized if the checkpoint holds a scale for it,
so lists such as `ignore` and `modules_to_not_convert` are not read. With `--load-format dummy`
there are no scales, and we quantize every linear layer except routers, `kv_b_proj` and the head.

`--quantization fp8` converts a checkpoint that is not quantized: each row of a weight and each
token gets a scale. A checkpoint in fp8 stays as it is. The nodes of a pair need the same setting;
otherwise the proxy does not pair them, and names the difference.

A GPU keeps the weights in fp8. A CPU computes with the weights in float32, so fp8 saves no memory
there. Inputs are still rounded to fp8, so the answers are those of the format.

## KV cache in fp8

You want twice the tokens in the same memory, or hand-offs of half the size:

```
pd-launch prefill --model DIR --kv-cache-dtype fp8_e4m3
pd-launch decode --model DIR --kv-cache-dtype fp8_e4m3
```

K and V, or the latents of MLA, are kept in fp8 (`float8_e4m3fn`), divided by a scale. The scales
come from the checkpoint, one of K and one of V for each layer: `k_scale` and `v_scale` below
`self_attn`, or below its `k_proj` and `v_proj`. Without scales in the checkpoint they are 1, and
values beyond 448 become 448. Answers change a little, as fp8 has three bits of mantissa.

Every token attends to the rounded values, also to those of its own chunk. So answers depend neither
on `--chunked-prefill-size` nor on cached prefixes, retraction or hand-offs. All features work with
it, for every architecture of the table. The cache of a drafter stays in the model's dtype.

All nodes of a model need the same setting. Otherwise the proxy does not pair them, and the decode
node refuses the prefill node with an error that names both values; we do not convert KV between
dtypes. `--attention-backend flashinfer` is refused, and `auto` chooses `triton` on a GPU, which
needs compute capability 8.9 or later.

## Everything else

A setting that changes results and is not implemented is refused with its name, for example
`attn_logit_softcapping`. [extending.md](extending.md#a-model) says how to add an architecture.
"""


def render() -> str:
    """Return the page."""
    rows = []
    for model_type, listed in ARCHITECTURES.items():
        architecture = find_architecture(model_type)
        latent = architecture.has_latents
        backends = [
            name
            for name, backend in BACKENDS.items()
            if (backend.has_latents or not latent)
            and (backend.has_windows or not architecture.has_sinks)
        ]
        cells = (
            f"`{listed.class_name}`",
            f"`{model_type}`",
            _describe_attention(architecture),
            "experts" if architecture.has_experts else "dense",
            ", ".join(f"`{name}`" for name in backends),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    rope = ", ".join(f"`{name}`" for name in ROPE_TYPES)
    return HEAD + "".join(rows) + TAIL.format(rope=rope)


def _describe_attention(architecture: Architecture) -> str:
    if architecture.has_latents:
        return "latent (MLA)"
    return "grouped queries" + (", sinks" if architecture.has_sinks else "")


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
