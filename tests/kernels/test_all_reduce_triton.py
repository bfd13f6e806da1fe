"""The all-reduce kernel on one device: what others would have sent lies in the mailbox before."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from pd.kernels.all_reduce_triton import (  # noqa: E402
    BLOCK,
    all_reduce,
    choose_word_dtype,
    count_mailbox_words,
)

SEED = int(os.environ.get("PD_TEST_SEED", "0"))
DEVICE = "cuda:0" if ON_GPU else "cpu"
# The interpreter converts float32 to bfloat16 by cutting off.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
BITS = {2: torch.int16, 4: torch.int32}


def words(x: torch.Tensor, epoch: int) -> torch.Tensor:
    """Numbers as they travel: in the upper half of a word, the lower has the epoch's flag."""
    half = 8 * x.element_size()
    bits = x.view(BITS[x.element_size()]).to(torch.int64)
    return ((bits << half) | (epoch & 0x7FFF)).to(choose_word_dtype(x.dtype))


def whole(x: torch.Tensor) -> torch.Tensor:
    """What travels of a block that is used in part: no word keeps the flag of another epoch."""
    return torch.nn.functional.pad(x, (0, BLOCK - len(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("first_epoch", [0, 0x7FFE])
def test_the_sum_of_what_all_ranks_have(
    dtype: torch.dtype, ranks: int, rank: int, first_epoch: int
) -> None:
    print(f"seed {SEED}")
    torch.manual_seed(SEED)
    capacity = 4 * BLOCK
    boxes = torch.zeros(
        ranks, count_mailbox_words(ranks, capacity), dtype=choose_word_dtype(dtype), device=DEVICE
    )
    addresses = torch.tensor([box.data_ptr() for box in boxes], device=DEVICE)
    epochs = torch.full((4,), first_epoch, dtype=torch.int32, device=DEVICE)
    stop = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    # Sizes change from call to call, so that programs take part in some calls only.
    for call, size in enumerate((1, 3 * BLOCK + 5, BLOCK, 2 * BLOCK)):
        x = torch.randn(ranks, size, device=DEVICE).to(dtype)
        blocks = epochs.clone()
        for program in range(-(-size // BLOCK)):
            epoch = int(blocks[program]) + 1
            places = slice(program * BLOCK, (program + 1) * BLOCK)
            inbox = boxes[rank].view(2, ranks, capacity)[epoch & 1]
            for sender in range(ranks):
                if sender != rank:
                    inbox[sender, places] = words(whole(x[sender, places]), epoch)
        out = torch.full_like(x[0], float("nan"))
        all_reduce(x[rank], out, addresses, epochs, stop, capacity, rank)
        expected = torch.zeros(size, device=DEVICE)
        for row in x:  # in this order
            expected += row.float()
        assert torch.equal(out, expected.to(dtype)), f"call {call}"
        for program in range(-(-size // BLOCK)):
            epoch = int(blocks[program]) + 1
            assert int(epochs[program]) == epoch
            places = slice(program * BLOCK, (program + 1) * BLOCK)
            for peer in set(range(ranks)) - {rank}:
                sent = boxes[peer].view(2, ranks, capacity)[epoch & 1, rank, places]
                assert torch.equal(sent, words(whole(x[rank, places]), epoch))


def test_nobody_is_waited_for_once_it_is_stopped() -> None:
    boxes = torch.zeros(2, count_mailbox_words(2, BLOCK), dtype=torch.int32, device=DEVICE)
    addresses = torch.tensor([box.data_ptr() for box in boxes], device=DEVICE)
    epochs = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    stop = torch.ones(1, dtype=torch.int32, device=DEVICE)
    x = torch.ones(8, dtype=torch.float16, device=DEVICE)
    all_reduce(x, torch.empty_like(x), addresses, epochs, stop, BLOCK, 0)
    assert int(epochs[0]) == 1
