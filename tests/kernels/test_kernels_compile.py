"""Kernels of drafts, of experts in MXFP4 and of fp8 compile for a GPU that is not here: the
interpreter accepts more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Compiled in a process of its own, since the other tests interpret kernels.
PROGRAM = """
import itertools
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pd.kernels import acceptance_triton, fp8_rows_triton, fp8_triton, moe_fp8_triton, moe_triton
from pd.kernels import penalties_triton, rope_triton
from pd.kernels.attention import triton_kernel

def compiled(kernel, pointers, numbers, constants, tile=None):
    missing = set(kernel.arg_names) - pointers.keys() - numbers.keys() - constants.keys()
    assert not missing, f"{kernel.__name__} has other arguments: {missing}"
    types = pointers | numbers | {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages} if tile else {}
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    print(kernel.__name__)

def int64(names):
    return {name: "*i64" for name in names.split()}

pool = {"out": "*bf16", "q": "*bf16", "keys": "*bf16", "values": "*bf16", "num_items": "*i32"}
pool |= {"items": "*i32", "tables": "*i32", "partials": "*fp32", "partial_lse": "*fp32"}
numbers = {"q_stride": "i32", "scale": "fp32", "value_scale": "fp32"}
shape = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": 16, "NUM_FIELDS": 9, "ROWS": 16}
shape |= {"MERGE_ROWS": 8, "MERGE_SPLITS": 8, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_D": 128}
shape |= {"PRECISION": "tf32", "PDL": False, "VALUE_DIM": 128, "BLOCK_REST": 16}
shape |= {"WINDOW": 0, "MAIN_DIM": 128, "BLOCK_MAIN": 128, "IS_LATENT": False, "IN_HALF": False}
latents = {"KV_HEADS": 1, "GROUP": 16, "HEAD_DIM": 576, "VALUE_DIM": 512, "BLOCK_D": 512}
latents |= {"BLOCK_N": 32, "BLOCK_REST": 64, "MAIN_DIM": 512, "BLOCK_MAIN": 512}
latents |= {"IS_LATENT": True}
expanded = {"KV_HEADS": 16, "GROUP": 1, "HEAD_DIM": 192, "BLOCK_M": 128, "BLOCK_REST": 64}
seen = ["masks", "bases", "token_positions"]
for count in range(len(seen) + 1):
    given = int64(" ".join(seen[:count]))
    without = dict.fromkeys(seen[count:])
    attention = pool | {"arrivals": "*i32"} | given
    for each in (shape, shape | latents) if count in (0, 3) else (shape,):
        without_sinks = each | without | {"sinks": None}
        compiled(triton_kernel.paged_attention, attention, numbers, without_sinks)
    if count != 1:
        windowed = shape | without | {"WINDOW": 100}
        compiled(triton_kernel.paged_attention, attention | {"sinks": "*fp32"}, numbers, windowed)
without_masks = dict.fromkeys([*seen, "sinks"])
expanded = shape | expanded | without_masks
compiled(triton_kernel.paged_attention, pool | {"arrivals": "*i32"}, numbers, expanded)
fp8_pool = pool | {"arrivals": "*i32", "keys": "*fp8e4nv", "values": "*fp8e4nv"}
for each in (shape | {"WINDOW": 100}, shape | latents):
    in_half = each | without_masks | {"IN_HALF": True}
    compiled(triton_kernel.paged_attention, fp8_pool, numbers, in_half)
without_sinks = without_sinks | {"IN_HALF": True}
compiled(triton_kernel.paged_attention, fp8_pool | int64(" ".join(seen)), numbers, without_sinks)
rotated = {name: "*bf16" for name in "qkv q_weight k_weight".split()}
rotated |= {"cos_sin": "*fp32", "slots": "*i64"}
sizes = {"tokens": "i32", **dict.fromkeys("eps k_inverse v_inverse".split(), "fp32")}
heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "ROTATED": 64, "HEADS": 8, "BLOCK": 64}
for stored, norm in (("*bf16", True), ("*fp8e4nv", False), ("*fp8e4nv", True)):
    given = rotated | {"keys": stored, "values": stored}
    compiled(rope_triton._rotate_and_store, given, sizes, heads | {"NORM": norm, "PDL": True})
tokens = int64("slots places") | {"limits": "*i32", "firsts": "*i32", "tables": "*i32"}
sizes = {"rows": "i32", "extra_slot": "i32"}
block = {"PAGE_SIZE": 16, "BLOCK": 128, "PDL": False}
compiled(triton_kernel.locate_tokens, tokens, sizes, block)
drafts = int64("sampled guesses parents rows firsts counts forced stops")
drafts |= int64("last counted tokens positions path")
for width in (0, 4):
    compiled(acceptance_triton._accept_draft, drafts, {}, {"WIDTH": width, "PDL": False})
counted = {"counts": "*i32"} | int64("places tokens sampled_rows sampled")
pairs = {"vocab": "i32", "num_pairs": "i32"}
compiled(penalties_triton._count_tokens, counted, pairs, {"PAIRS": 128, "PDL": False})
experts = {"matrices": "*u8", "scales": "*u8", "starts": "*i32", "order": "*i32"}
numbers = dict.fromkeys("inputs outputs first_expert".split(), "i32")
numbers |= {"alpha": "fp32", "limit": "fp32"}
shape = {"TOP_K": 4, "EXPERTS": 32, "EXPERTS_BLOCK": 32, "CLAMPED": True, "PDL": True}
numbers |= {"scale_step": "i32"}
shape |= {"scale_pitch": 1}
cases = [("fp32", 1), ("fp16", 8), *(("bf16", rows) for rows in (0.2, 8, 64, 1024))]
for gated, (dtype, rows) in itertools.product((True, False), cases):
    halves = dict.fromkeys("x out weights biases".split(), "*" + dtype)
    unpacks = dtype == "fp32"
    tile = moe_triton._choose_tile(rows, torch.float32)
    if not unpacks:
        tile = moe_triton._choose_mxfp4_tile(rows)
    constants = shape | {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    constants |= {"GATED": gated, "UNPACK": unpacks, "AHEAD": rows > 16, "SORTED": rows >= 1}
    given = experts | halves | ({} if rows >= 1 else {"order": "*i64"})
    compiled(moe_triton._multiply_blocks, given, numbers, constants, tile)
summed = {"results": "*bf16", "out": "*bf16"}
sizes = dict.fromkeys("size first_expert stop_expert".split(), "i32")
constants = {"TOP_K": 4, "BLOCK": 512, "PDL": True}
compiled(moe_triton._sum_experts, summed, sizes, constants | {"ids": None})
compiled(moe_triton._sum_experts, summed | {"ids": "*i64"}, sizes, constants)
sorted = {"ids": "*i64", "order": "*i32", "starts": "*i32"}
sizes = {"count": "i32", "first_expert": "i32"}
compiled(moe_triton._sort_assignments, sorted, sizes, {"CHUNK": 1024, "PDL": True})
rows = {"x": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
numbers = dict.fromkeys("x_stride size width num_groups stride lead".split(), "i32")
for span, rounds in ((128, True), (4096, False)):
    shape = {"GROUPS": 1024 // span or 1, "SPAN": span, "ROUNDS": rounds, "PDL": True}
    shape |= {"input_scale": None}
    for gated in (True, False):
        gate = shape | {"GATED": gated}
        compiled(fp8_rows_triton._quantize_rows, rows, numbers, gate | {"limit": None})
    compiled(fp8_rows_triton._quantize_rows, rows | {"limit": "*i32"}, numbers, gate)
    normed = rows | {"residual": "*bf16", "weight": "*bf16"}
    sizes = dict.fromkeys("size width num_groups stride".split(), "i32") | {"eps": "fp32"}
    compiled(fp8_rows_triton._rms_norm, normed, sizes, shape)
sizes = dict.fromkeys("x_stride size width lead".split(), "i32")
for gated in (True, False):
    shape = {"BLOCK": 4096, "ROUNDS": False, "GATED": gated, "PDL": True}
    compiled(fp8_rows_triton._quantize_long_rows, rows, sizes, shape | {"limit": None})
compiled(fp8_rows_triton._quantize_long_rows, rows | {"limit": "*i32"}, sizes, shape)
given = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scales": "*fp32", "w_scales": "*fp32"}
given |= {"out": "*bf16", "bias": "*bf16"}
numbers = dict.fromkeys("num_rows outputs width num_groups stride".split(), "i32")
for count, outputs, group in itertools.product((1, 64, 128), (4096, 28672), (0, 128)):
    tile = fp8_triton._choose_tile(count, outputs, group)
    shape = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "DEPTH": tile.depth, "SHARED": 64}
    shape |= {"GROUPED": group > 0, "EVEN": group > 0, "NEIGHBOURS": 16, "LINES": 8}
    shape |= {"STAGES": tile.num_stages, "PDL": True}
    compiled(fp8_triton._multiply_rows, given, numbers, shape)
for outputs, group in itertools.product((4096, 6144), (0, 128)):
    tile = fp8_triton._choose_row_tile(outputs, 4096)
    shape = {"OUTPUTS": tile.outputs, "DEPTH": tile.depth, "STAGES": tile.num_stages, "PDL": True}
    shape |= {"SHARED": 128 if group else 1, "GROUP": group}
    compiled(fp8_triton._multiply_row, given, numbers, shape)
scaled = dict.fromkeys("sums x_scales w_scales".split(), "*fp32")
scaled |= {"out": "*bf16", "bias": "*bf16"}
compiled(fp8_triton._scale_sums, scaled, {"outputs": "i32"}, {"BLOCK": 1024, "PDL": True})
del given["weight"], given["w_scales"], given["bias"], numbers["num_rows"]
given |= {"matrices": "*fp8e4nv", "scales": "*fp32", "starts": "*i32", "order": "*i32"}
given |= {"weights": "*bf16"}
experts = {"TOP_K": 8, "EXPERTS": 128, "EXPERTS_BLOCK": 128, "SHARED": 64, "PDL": True}
for count, gated, group in itertools.product((1, 64, 128), (True, False), (0, 128)):
    tile = moe_fp8_triton._choose_tile(count, gated)
    shape = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "DEPTH": tile.depth}
    shape |= {"GROUPED": group > 0, "GATED": gated, "EVEN": group > 0, "STAGES": tile.num_stages}
    compiled(moe_fp8_triton._multiply_blocks, given, numbers, experts | shape)
"""


def test_kernels_of_drafts_compile() -> None:
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split().count("paged_attention") == 13
    assert ran.stdout.split().count("_multiply_blocks") == 24
    assert ran.stdout.split().count("_multiply_rows") == 12
    assert ran.stdout.split().count("_multiply_row") == 4
