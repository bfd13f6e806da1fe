"""Paged attention in Triton: one kernel for decode steps, chunks and trees.

This is FlashAttention-2 (Dao, 2023) over pages. The query heads that share K and V are packed into
the rows of one tile, and keys are split among programs as in Flash-Decoding (Dao et al., 2023). The
program that finishes a tile's last split merges them, so we need no second launch.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from pd.kernels.triton_launch import start_next, wait_for_previous

# Fields of a work item, int32 each: first row of its tile among the step's tokens, number of
# tokens, position of the first of them (of the first of its tree), start of its page table, the
# keys ``[begin, end)`` to attend to, its own slot for a partial result, the first slot of its tile,
# and the number of splits of its tile.
FIELDS = 9


@triton.jit
def _is_visible(mask, offset):
    """Whether an int64 mask shows the key at ``offset`` from its base, if it has a bit for that
    key. Keys before the base are visible."""
    bit = tl.minimum(tl.maximum(offset, 0), 63).to(tl.int64)
    return (offset < 0) | (((mask >> bit) & 1) == 1)


@triton.jit
def _count_bits(mask):
    """The number of bits set in an int64."""
    x = mask.to(tl.uint64, bitcast=True)
    x -= (x >> 1) & 0x5555555555555555
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 127).to(tl.int32)


@triton.jit
def _is_in_window(mask, offset, WINDOW: tl.constexpr):
    """Whether the key at ``offset`` from the base of an int64 mask is among the last WINDOW that
    the mask shows, if it shows that key."""
    bit = tl.minimum(tl.maximum(offset, 0), 63)
    later = mask.to(tl.uint64, bitcast=True) >> bit.to(tl.uint64)
    return _count_bits(later.to(tl.int64, bitcast=True)) - tl.minimum(offset, 0) <= WINDOW


@triton.jit
def _convert_to_half(x):
    """The nearest float16 numbers."""
    return tl.clamp(x.to(tl.float32), -65504.0, 65504.0).to(tl.float16)


@triton.jit
def _attend_range(
    peak,
    total,
    result,
    queries,
    rest_queries,
    keys,
    values,
    table,
    first,
    stop,
    end,
    reach,
    base,
    scale,
    main,
    rest,
    dims,
    KEY_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_LATENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    SEEN: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the keys ``[first, stop)``.

    Without MASKED, every row sees all of them. With it, SEEN defines the keys before ``end`` that
    rows see. Others are not loaded, because they may be NaN:

    - "causal": row i sees keys up to ``reach[i]``.
    - "trees": row i sees keys before ``base``, and from there those of the mask ``reach[i]``.
    - "drafts": all rows see keys before ``base``, and from there those of the one mask ``reach``.
      Keys that it hides are not loaded either.

    If WINDOW is not 0, rows see only the last WINDOW of these keys.

    ``main`` counts the first MAIN_DIM numbers of a key, ``rest`` the others, of which there may be
    none, and ``dims`` those of a value. With IS_LATENT the main part of a key is its value.
    """
    for start in tl.range(first, stop, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        if MASKED:
            there = positions < end
            pages = tl.load(table + positions // PAGE_SIZE, mask=there, other=0)
            if SEEN == "drafts":
                there = there & _is_visible(reach, positions - base)
                if WINDOW > 0:
                    there = there & _is_in_window(reach, positions - base, WINDOW)
        else:
            pages = tl.load(table + positions // PAGE_SIZE)
        slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        offsets = slots[:, None] * KEY_STRIDE + main[None, :]
        mask = (main < MAIN_DIM)[None, :]
        if MASKED:
            mask = mask & there[:, None]
        if MASKED or main.shape[0] != MAIN_DIM:
            k = tl.load(keys + offsets, mask=mask, other=0.0).to(queries.dtype)
        else:
            k = tl.load(keys + offsets).to(queries.dtype)
        if IS_LATENT:
            v = k
        else:
            value_mask = (dims < VALUE_DIM)[None, :]
            if MASKED:
                value_mask = value_mask & there[:, None]
            at = slots[:, None] * (KEY_STRIDE // HEAD_DIM * VALUE_DIM) + dims[None, :]
            if MASKED or dims.shape[0] != VALUE_DIM:
                v = tl.load(values + at, mask=value_mask, other=0.0).to(queries.dtype)
            else:
                v = tl.load(values + at).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if MAIN_DIM < HEAD_DIM:
            rest_mask = (rest < HEAD_DIM - MAIN_DIM)[None, :]
            if MASKED:
                rest_mask = rest_mask & there[:, None]
            offsets = slots[:, None] * KEY_STRIDE + MAIN_DIM + rest[None, :]
            if MASKED or rest.shape[0] != HEAD_DIM - MAIN_DIM:
                k = tl.load(keys + offsets, mask=rest_mask, other=0.0).to(queries.dtype)
            else:
                k = tl.load(keys + offsets).to(queries.dtype)
            scores = tl.dot(rest_queries, tl.trans(k), scores, input_precision=PRECISION)
        if MASKED:
            if SEEN == "causal":
                visible = (positions[None, :] <= reach[:, None]) & there[None, :]
                if WINDOW > 0:
                    visible = visible & (positions[None, :] > reach[:, None] - WINDOW)
            elif SEEN == "trees":
                visible = _is_visible(reach[:, None], (positions - base)[None, :]) & there[None, :]
                if WINDOW > 0:
                    offset = (positions - base)[None, :]
                    visible = visible & _is_in_window(reach[:, None], offset, WINDOW)
            else:
                visible = there[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        shift = new_peak
        if MASKED:  # a row that has seen nothing yet
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weights, 1)
        result = result * fade[:, None]
        result = tl.dot(weights.to(v.dtype), v, result, input_precision=PRECISION)
        peak = new_peak
    return peak, total, result


@triton.jit
def _merge_splits(
    partials,
    partial_lse,
    base,
    stride,
    splits,
    exists,
    dims,
    VALUE_DIM: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """The softmax-weighted mean over a tile's splits of some of its rows.

    Args:
        base: place of each row of the first split, in rows of VALUE_DIM. Splits are ``stride``
            apart.
        exists: which rows there are.

    All loads of MERGE_SPLITS splits are under way together, and no thread needs data loaded by
    another.
    """
    peak = tl.full([base.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([base.shape[0]], tl.float32)
    merged = tl.zeros([base.shape[0], dims.shape[0]], tl.float32)
    mask = exists[:, None] & (dims < VALUE_DIM)[None, :]
    for start in range(0, splits, MERGE_SPLITS):
        new_peak = peak
        for i in tl.static_range(MERGE_SPLITS):
            there = exists & (start + i < splits)
            # NOTE: we bypass the L1 cache, because it does not see writes of other multiprocessors.
            lse = tl.load(
                partial_lse + base + (start + i) * stride,
                mask=there,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(new_peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = tl.exp2(peak - shift)
        total = total * fade
        merged = merged * fade[:, None]
        for i in tl.static_range(MERGE_SPLITS):
            there = exists & (start + i < splits)
            at = base + (start + i) * stride
            lse = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(
                partials + at[:, None] * VALUE_DIM + dims[None, :],
                mask=mask & (start + i < splits),
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp2(lse - shift)
            total += weight
            merged += part * weight[:, None]
        peak = new_peak
    return merged / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def paged_attention(
    out,
    q,
    keys,
    values,
    num_items,
    items,
    tables,
    partials,
    partial_lse,
    arrivals,
    q_stride,
    scale,
    value_scale,
    masks,
    bases,
    token_positions,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_LATENT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_MAIN: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IN_HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One work item and KV head per program. Programs without an item end at once.

    Args:
        out: ``[tokens, heads, VALUE_DIM]``.
        q: rows of tokens ``q_stride`` apart, ``heads * HEAD_DIM`` wide.
        keys: one layer of the pool, ``[slots, KV_HEADS, HEAD_DIM]``; values: ``[slots, KV_HEADS,
            VALUE_DIM]``. With IS_LATENT, these are rows of latents ``[slots, 1, HEAD_DIM]``, whose
            first MAIN_DIM numbers are the values, and KV_HEADS groups of query heads read the same
            rows.
        num_items: int32 ``[1]``. items: int32 ``[num_items, NUM_FIELDS]``. tables: int32.
        partials: float32 ``[slots, KV_HEADS, ROWS, VALUE_DIM]``, normalized results of splits;
            partial_lse: ``[slots, KV_HEADS, ROWS]``, base-2 logarithms of their softmax sums.
        arrivals: int32 ``[slots, KV_HEADS]``, zero before and after.
        scale: factor of the scores, times log2(e). value_scale: factor of the results. Both include
            the scale of keys and values in fp8, which are converted to the dtype of ``q``.
        masks: int64, one for each token, or None if all tokens are causal. Bit i stands for the key
            i positions after the first token of the tree, or after the token's base.
        bases: int64, for each token the position before which it sees all keys. None if work items
            define it.
        token_positions: int64, positions of the tokens, if they belong to trees that begin at their
            bases; work items then only limit how far their keys may reach. None if tiles are single
            tokens, or without bases.
        sinks: float32 ``[heads]``, scores without values; None for none.
        MAIN_DIM: size of the first part of a key. The rest, if any, is multiplied on its own, so
            neither part is rounded up far to a power of two.
        IN_HALF: whether products are of float16 numbers. A GPU converts fp8 to those with one
            instruction, and to bfloat16 with several. Queries beyond their range are cut off.
        WINDOW: number of keys that a token sees; 0 for all.
        ROWS: of a tile, ``tokens * GROUP`` at most; BLOCK_M: that rounded up for ``tl.dot``.
        MERGE_ROWS, MERGE_SPLITS: rows and splits merged at a time.
        PDL: see :mod:`pd.kernels.triton_launch`. Work items are uploaded before a step's kernels,
            so we can read them without waiting. Programs without an item need not wait, because
            others do.
    """
    start_next(PDL)
    head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    # NOTE: we read the fields before we know whether the item exists, to wait once instead of
    # twice. Callers give the grid no more items than there is memory for.
    fields = items + item * NUM_FIELDS
    row = tl.load(fields).to(tl.int64)
    tokens = tl.load(fields + 1)
    position = tl.load(fields + 2)
    table = tables + tl.load(fields + 3)
    begin = tl.load(fields + 4)
    end = tl.load(fields + 5)
    slot = tl.load(fields + 6).to(tl.int64)
    first_slot = tl.load(fields + 7)
    splits = tl.load(fields + 8)
    if item >= tl.load(num_items):
        return
    wait_for_previous(PDL)

    lanes = tl.arange(0, BLOCK_M)
    main = tl.arange(0, BLOCK_MAIN)
    dims = tl.arange(0, BLOCK_D)
    token = lanes // GROUP
    exists = token < tokens
    dims_exist = (dims < VALUE_DIM)[None, :]
    query_head = (head * GROUP + lanes % GROUP)[:, None]
    columns = query_head * VALUE_DIM + dims[None, :]
    query_rows = q + (row + token)[:, None] * q_stride + query_head * HEAD_DIM
    main_exists = exists[:, None] & (main < MAIN_DIM)[None, :]
    queries = tl.load(query_rows + main[None, :], mask=main_exists, other=0.0)
    if IN_HALF:
        queries = _convert_to_half(queries)
    rest_queries, rest = None, None
    if MAIN_DIM < HEAD_DIM:
        rest = tl.arange(0, BLOCK_REST)
        rest_queries = tl.load(
            query_rows + MAIN_DIM + rest[None, :],
            mask=exists[:, None] & (rest < HEAD_DIM - MAIN_DIM)[None, :],
            other=0.0,
        )
        if IN_HALF:
            rest_queries = _convert_to_half(rest_queries)
    if not IS_LATENT:
        keys += head * HEAD_DIM
        values += head * VALUE_DIM
    SEEN: tl.constexpr = (
        "causal"
        if masks is None
        else "trees"
        if bases is None or token_positions is not None
        else "drafts"
    )
    base = position
    reach = position + token
    if SEEN == "causal":
        base += 1
    elif token_positions is not None:
        base = tl.load(bases + row).to(tl.int32)
        end = tl.minimum(end, tl.load(token_positions + row + tokens - 1).to(tl.int32) + 1)
    elif SEEN == "drafts":
        base = tl.minimum(tl.load(bases + row), end).to(tl.int32)
        end = tl.minimum(end, base + 64)  # the bits of a mask
        reach = tl.load(masks + row)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None and slot == first_slot:
        # The first split counts the sinks. A tile without splits is its own first one.
        sink = tl.load(sinks + head * GROUP + lanes % GROUP)
        peak = sink.to(tl.float32) * 1.4426950408889634
        total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stride: tl.constexpr = HEAD_DIM if IS_LATENT else KV_HEADS * HEAD_DIM
    if WINDOW > 0:
        # The first key that some row sees, and the end of the keys that not every row sees.
        if SEEN == "causal":
            begin = tl.maximum(begin, position - WINDOW + 1)
            uneven = position + tokens - WINDOW
        elif SEEN == "trees":
            begin = tl.maximum(begin, base - WINDOW + 1)
            uneven = end
        else:
            begin = tl.maximum(begin, base + _count_bits(reach) - WINDOW)
            uneven = begin
        if SEEN == "trees":
            reach = tl.load(masks + row + token, mask=exists, other=0)
        uneven = begin + tl.cdiv(tl.maximum(uneven - begin, 0), BLOCK_N) * BLOCK_N
        uneven = tl.maximum(tl.minimum(uneven, end), begin)
        peak, total, result = _attend_range(
            peak,
            total,
            result,
            queries,
            rest_queries,
            keys,
            values,
            table,
            begin,
            uneven,
            end,
            reach,
            base,
            scale,
            main,
            rest,
            dims,
            stride,
            HEAD_DIM,
            MAIN_DIM,
            VALUE_DIM,
            IS_LATENT,
            PAGE_SIZE,
            BLOCK_N,
            True,
            SEEN,
            WINDOW,
            PRECISION,
        )
        begin = uneven
    # Before the base every row sees every key.
    seen_by_all = tl.minimum(end, base)
    unmasked = begin + tl.maximum(seen_by_all - begin, 0) // BLOCK_N * BLOCK_N
    peak, total, result = _attend_range(
        peak,
        total,
        result,
        queries,
        rest_queries,
        keys,
        values,
        table,
        begin,
        unmasked,
        end,
        reach,
        base,
        scale,
        main,
        rest,
        dims,
        stride,
        HEAD_DIM,
        MAIN_DIM,
        VALUE_DIM,
        IS_LATENT,
        PAGE_SIZE,
        BLOCK_N,
        False,
        SEEN,
        WINDOW,
        PRECISION,
    )
    if SEEN == "trees" and WINDOW == 0:
        # Loaded here, because in the loop it would take the registers of another program.
        reach = tl.load(masks + row + token, mask=exists, other=0)
    peak, total, result = _attend_range(
        peak,
        total,
        result,
        queries,
        rest_queries,
        keys,
        values,
        table,
        unmasked,
        end,
        end,
        reach,
        base,
        scale,
        main,
        rest,
        dims,
        stride,
        HEAD_DIM,
        MAIN_DIM,
        VALUE_DIM,
        IS_LATENT,
        PAGE_SIZE,
        BLOCK_N,
        True,
        SEEN,
        WINDOW,
        PRECISION,
    )
    heads: tl.constexpr = KV_HEADS * GROUP
    empty = total == 0.0
    result = result / tl.where(empty, 1.0, total)[:, None] * value_scale
    if splits == 1:
        places = (row + token)[:, None] * (heads * VALUE_DIM) + columns
        tl.store(out + places, result.to(out.dtype.element_ty), exists[:, None] & dims_exist)
    else:
        lse = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
        at = (slot * KV_HEADS + head) * ROWS + lanes
        inside = lanes < ROWS
        tl.store(partial_lse + at, lse, inside)
        tl.store(
            partials + at[:, None] * VALUE_DIM + dims[None, :], result, inside[:, None] & dims_exist
        )
        # Every thread's stores must be done before one of them announces this split.
        tl.debug_barrier()
        arrival = arrivals + first_slot * KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == splits - 1:
            for first_row in range(0, tokens * GROUP, MERGE_ROWS):
                rows = first_row + tl.arange(0, MERGE_ROWS)
                wanted = rows < tokens * GROUP
                merged = _merge_splits(
                    partials,
                    partial_lse,
                    (first_slot.to(tl.int64) * KV_HEADS + head) * ROWS + rows,
                    KV_HEADS * ROWS,
                    splits,
                    wanted,
                    dims,
                    VALUE_DIM,
                    MERGE_SPLITS,
                )
                places = (row + rows // GROUP) * heads + head * GROUP + rows % GROUP
                tl.store(
                    out + places[:, None] * VALUE_DIM + dims[None, :],
                    merged.to(out.dtype.element_ty),
                    wanted[:, None] & dims_exist,
                )
            tl.store(arrival, 0)


@triton.jit
def locate_tokens(
    slots,
    places,
    limits,
    firsts,
    tables,
    rows,
    extra_slot,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Slots of one token a row.

    Args:
        slots, places: int64 ``[rows]``. A place outside of ``[0, limits[row])`` becomes
            ``extra_slot``.
        limits, firsts: int32 ``[rows]``: number of tokens that a row's page table covers, and its
            start in ``tables``, int32.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    place = tl.load(places + row, mask=exists, other=-1)
    limit = tl.load(limits + row, mask=exists, other=0)
    first = tl.load(firsts + row, mask=exists, other=0)
    inside = (place >= 0) & (place < limit)
    page = tl.load(tables + first + place // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    slot = tl.where(inside, page * PAGE_SIZE + place % PAGE_SIZE, extra_slot)
    tl.store(slots + row, slot, exists)
