"""Sums over GPUs of one host that write into each other's memory, with one launch and one hop.

Every rank stores its numbers into a mailbox on each other GPU, and adds up the contents of its own.
As in NCCL's "LL" protocol, a number and a flag travel in one word, which arrives whole. So we need
no fences and no second hop, but twice the bytes. For the few kilobytes of a decode step, the number
of hops determines the time.
"""

# Triton's language has no types, so kernels have none either.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd.kernels.triton_launch import launch_kernel

# Numbers that each program exchanges.
BLOCK = 1024
_WARPS = 4
_WORDS = {2: torch.int32, 4: torch.int64}


@triton.jit
def _decode_number(word, HALF: tl.constexpr, BITS: tl.constexpr, NUMBER: tl.constexpr):
    """The number in the upper half of a word, in float32."""
    return (word >> HALF).to(BITS).to(NUMBER, bitcast=True).to(tl.float32)


@triton.jit
def _all_reduce(
    x,
    out,
    mailboxes,
    epochs,
    stop,
    numel,
    capacity,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b of all ranks exchanges block b.

    A mailbox is ``[2, RANKS, capacity]`` words: by the epoch's parity, by sender. Epochs count the
    launches of a program, so all ranks agree on them. A block is overwritten two epochs later. By
    then its sender has received the blocks of the epoch in between, and a rank sends those in a
    launch after the one that read the first.

    Blocks always travel whole, even if part of the last one is unused, because flags repeat after
    32,768 epochs: a skipped word might have the flag of an epoch long past.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    number: tl.constexpr = x.dtype.element_ty
    bits: tl.constexpr = tl.int16 if HALF == 16 else tl.int32
    words: tl.constexpr = tl.int32 if HALF == 16 else tl.int64
    mine = tl.load(x + offsets, inside, other=0.0)
    flag = epoch & 0x7FFF
    word = (mine.to(bits, bitcast=True).to(words) << HALF) | flag.to(words)
    base = (epoch & 1).to(tl.int64) * RANKS * capacity + offsets
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            box = tl.load(mailboxes + peer).to(tl.pointer_type(words))
            tl.store(box + base + RANK * capacity, word)
    own = tl.load(mailboxes + RANK).to(tl.pointer_type(words))
    total = tl.zeros((BLOCK,), tl.float32)
    for sender in tl.static_range(RANKS):  # the same order on every rank
        if sender == RANK:
            total += mine.to(tl.float32)
        else:
            places = own + base + sender * capacity
            got = tl.load(places, volatile=True)
            waiting = tl.max(((got & 0x7FFF) != flag).to(tl.int32), 0)
            while (waiting != 0) & (tl.load(stop, volatile=True) == 0):
                got = tl.load(places, volatile=True)
                waiting = tl.max(((got & 0x7FFF) != flag).to(tl.int32), 0)
            total += _decode_number(got, HALF, bits, number)
    tl.store(out + offsets, total.to(number), inside)
    tl.store(epochs + program, epoch)


def count_mailbox_words(ranks: int, capacity: int) -> int:
    """Return the number of words in a mailbox for up to ``capacity`` numbers."""
    return 2 * ranks * capacity


def all_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    mailboxes: torch.Tensor,
    epochs: torch.Tensor,
    stop: torch.Tensor,
    capacity: int,
    rank: int,
) -> None:
    """Set ``out`` to the sum of all ranks' ``x``, added up in float32 in the order of ranks.

    Every rank launches this with the same shapes, in the same order, on one stream. It waits for
    the others on the device. A graph can capture it.

    Args:
        x: contiguous float32, bfloat16 or float16, at most ``capacity`` numbers.
        out: like ``x``, not overlapping it.
        mailboxes: int64 ``[ranks]`` on the device: the address of each rank's mailbox as mapped
            here. Its words (:func:`count_mailbox_words`) must be zero at first. A word is int32 for
            16-bit numbers and int64 for 32-bit numbers.
        capacity: numbers that a mailbox can hold, a multiple of ``BLOCK``.
        epochs: int32, this rank's, one for each ``BLOCK`` of ``capacity``, zero at first.
        stop: int32 ``[1]``. Once it is not zero, nobody waits for other ranks and sums are wrong.
        rank: number of this rank.
    """
    assert x.is_contiguous() and out.is_contiguous()
    assert x.numel() <= capacity and not capacity % BLOCK
    launch_kernel(
        _all_reduce,
        (triton.cdiv(x.numel(), BLOCK),),
        x.device,
        x,
        out,
        mailboxes,
        epochs,
        stop,
        x.numel(),
        capacity,
        RANK=rank,
        RANKS=len(mailboxes),
        HALF=8 * x.element_size(),
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )


def choose_word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a mailbox's words for numbers of ``dtype``."""
    return _WORDS[dtype.itemsize]
