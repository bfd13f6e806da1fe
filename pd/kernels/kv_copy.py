"""Copies KV rows between a pool's slots, packed buffers and the pool of another GPU.

Here a pool is one plane (:class:`pd.core.node_info.Plane`), and its layers start at 0. A row is one
vector (K or V) of one token in one layer: ``num_heads * head_dim`` adjacent elements. Pools are
``[num_layers, vectors, num_slots, num_heads, head_dim]``. Packed data is contiguous bytes in the
order ``[layers, vectors, tokens, row]``. If tensor-parallel ranks divide the heads, each has such a
pool for its own heads, while packed rows contain all heads. A slab is all rows of one vector of one
layer.

On the CPU we use numpy. It is also the reference of the Triton kernel that does all three kinds of
copies on a GPU (:mod:`pd.kernels.kv_copy_triton`), queued on the current stream of the pool's
device.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd.kernels.kv_copy_triton import LaunchShape

    Slabs = list[npt.NDArray[np.int8]]

# Numbers of adjacent slots that the CPU copies as one if a sequence's pages allow it.
_RUNS = (64, 16, 4)


def count_row_bytes(buffer: torch.Tensor) -> int:
    """Return the bytes of one vector of one token in one layer of a pool."""
    return buffer.shape[3] * buffer.shape[4] * buffer.element_size()


def gather_rows(
    buffer: torch.Tensor, slots: torch.Tensor, layer_start: int, layer_stop: int, out: torch.Tensor
) -> None:
    """Pack the vectors of some tokens of some layers.

    Args:
        buffer: the pool, contiguous.
        slots: int32 or int64 ``[n]`` on the pool's device, all inside the pool (not checked on a
            GPU).
        out: contiguous, of any dtype, on the pool's device, of exactly ``(layer_stop - layer_start)
            * vectors * n * count_row_bytes(buffer)`` bytes.

    Raises:
        ValueError: shapes, sizes or devices do not fit.
        IndexError: a slot lies outside the pool (CPU).
    """
    packed = _view_packed(buffer, slots, layer_start, layer_stop, out)
    if buffer.is_cuda:
        from pd.kernels.kv_copy_triton import Side, copy_rows

        pool = Side(buffer.data_ptr(), buffer.shape[1] * layer_start, buffer.shape[2], slots)
        whole = Side(packed.data_ptr(), 0, len(slots))
        num_slabs = buffer.shape[1] * (layer_stop - layer_start)
        copy_rows(pool, whole, len(slots), num_slabs, count_row_bytes(buffer), buffer.device)
        return
    slabs = _view_slabs(buffer, layer_start, layer_stop)
    for index, where, run in _split_runs(_check_slots(slots, buffer.shape[2])):
        for source, target in zip(slabs, _view_packed_slabs(packed, slabs, slots), strict=True):
            # NOTE: the slots were checked. Without "clip" numpy would copy through a buffer.
            np.take(
                _view_runs(source, run),
                index,
                axis=0,
                out=_view_runs(target[where], run),
                mode="clip",
            )


def gather_parts(
    buffer: torch.Tensor,
    parts: Sequence[int],
    slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    out: torch.Tensor,
) -> None:
    """:func:`gather_rows` of all heads.

    Args:
        buffer: one rank's pool. The others' have the same shape.
        parts: address of each rank's pool in the order of their heads, valid on this device.
        slots: as for :func:`gather_rows`, int32.
        out: of exactly ``len(parts)`` times the bytes of one rank.

    Raises:
        ValueError, IndexError: as :func:`gather_rows` does.
    """
    _copy_parts(buffer, parts, slots, layer_start, layer_stop, out, into_pool=False)


def scatter_parts(
    buffer: torch.Tensor,
    parts: Sequence[int],
    slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    data: torch.Tensor,
) -> None:
    """The reverse of :func:`gather_parts`, with the same arguments. Slots must differ from each
    other."""
    _copy_parts(buffer, parts, slots, layer_start, layer_stop, data, into_pool=True)


def _copy_parts(
    buffer: torch.Tensor,
    parts: Sequence[int],
    slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    data: torch.Tensor,
    *,
    into_pool: bool,
) -> None:
    """Copy packed rows. Each one consists of ``len(parts)`` rows of pools, one after another."""
    packed = _view_packed(buffer, slots, layer_start, layer_stop, data, len(parts))
    num_slabs, width = buffer.shape[1] * (layer_stop - layer_start), count_row_bytes(buffer)
    for index, address in enumerate(parts):
        if buffer.is_cuda:
            from pd.kernels.kv_copy_triton import Side, copy_rows, select_part

            whole = select_part(packed, slots, index, len(parts))
            pool = Side(address, buffer.shape[1] * layer_start, buffer.shape[2], slots)
            source, target = (whole, pool) if into_pool else (pool, whole)
            copy_rows(source, target, len(slots), num_slabs, width, buffer.device)
            continue
        chosen = _check_slots(slots, buffer.shape[2])
        memory = (ctypes.c_int8 * buffer.nbytes).from_address(address)
        slabs = np.ctypeslib.as_array(memory).reshape(-1, buffer.shape[2], width)
        slabs = slabs[buffer.shape[1] * layer_start : buffer.shape[1] * layer_stop]
        rows_of_all = packed.numpy().view(np.int8).reshape(num_slabs, -1, len(parts), width)
        if into_pool:
            slabs[:, chosen] = rows_of_all[:, :, index]
        else:
            rows_of_all[:, :, index] = slabs[:, chosen]


def scatter_rows(
    buffer: torch.Tensor,
    slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    data: torch.Tensor,
) -> None:
    """Write packed vectors into slots, the reverse of :func:`gather_rows`, with the same arguments.

    Slots must differ from each other.
    """
    packed = _view_packed(buffer, slots, layer_start, layer_stop, data)
    if buffer.is_cuda:
        from pd.kernels.kv_copy_triton import Side, copy_rows

        whole = Side(packed.data_ptr(), 0, len(slots))
        pool = Side(buffer.data_ptr(), buffer.shape[1] * layer_start, buffer.shape[2], slots)
        num_slabs = buffer.shape[1] * (layer_stop - layer_start)
        copy_rows(whole, pool, len(slots), num_slabs, count_row_bytes(buffer), buffer.device)
        return
    slabs = _view_slabs(buffer, layer_start, layer_stop)
    for index, where, run in _split_runs(_check_slots(slots, buffer.shape[2])):
        for target, source in zip(slabs, _view_packed_slabs(packed, slabs, slots), strict=True):
            _view_runs(target, run)[index] = _view_runs(source[where], run)


def copy_to_peer(
    buffer: torch.Tensor,
    slots: torch.Tensor,
    peer: int,
    peer_num_slots: int,
    peer_slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    shape: LaunchShape | None = None,
) -> None:
    """Copy tokens directly into another pool of the same layers, vectors, heads and dtype.

    Args:
        buffer: our pool, contiguous.
        slots: int32 or int64 ``[n]`` on the pool's device: the tokens' slots in our pool.
        peer: address of the other pool, valid for our pool's device (mapped by CUDA IPC or peer
            access); on the CPU an address of this process.
        peer_num_slots: slots of the other pool.
        peer_slots: like ``slots``: the tokens' slots in the other pool, each slot once.
        shape: launch parameters of the kernel (tuned by ``benchmarks/kv_copy.py``).

    Raises:
        ValueError: shapes, sizes or devices do not fit.
        IndexError: a slot lies outside its pool (CPU).
    """
    _check_pool(buffer, slots, layer_start, layer_stop)
    if peer_slots.shape != slots.shape or peer_slots.device != slots.device:
        raise ValueError(f"{slots.shape} slots cannot be copied to {peer_slots.shape}")
    if buffer.is_cuda:
        from pd.kernels.kv_copy_triton import PEER_SHAPE, Side, copy_rows

        own_side = Side(buffer.data_ptr(), buffer.shape[1] * layer_start, buffer.shape[2], slots)
        peer_side = Side(peer, buffer.shape[1] * layer_start, peer_num_slots, peer_slots)
        num_slabs = buffer.shape[1] * (layer_stop - layer_start)
        width, shape = count_row_bytes(buffer), shape or PEER_SHAPE
        copy_rows(own_side, peer_side, len(slots), num_slabs, width, buffer.device, shape)
        return
    own = _check_slots(slots, buffer.shape[2])
    theirs = _check_slots(peer_slots, peer_num_slots)
    slabs = _view_slabs(buffer, layer_start, layer_stop)
    for number, source in enumerate(slabs, start=buffer.shape[1] * layer_start):
        size = peer_num_slots * count_row_bytes(buffer)
        memory = (ctypes.c_int8 * size).from_address(peer + number * size)
        target = np.ctypeslib.as_array(memory).reshape(peer_num_slots, -1)
        target[theirs] = source[own]


def compile_copies(buffer: torch.Tensor) -> None:
    """Compile the kernel for a pool's rows now, so no request has to wait for it. The pool itself
    is not touched. On the CPU nothing happens."""
    if not buffer.is_cuda:
        return
    with torch.cuda.device(buffer.device):
        small = torch.zeros(
            (1, buffer.shape[1], 1, *buffer.shape[3:]), dtype=buffer.dtype, device=buffer.device
        )
        peer, slots = (
            torch.zeros_like(small),
            torch.zeros(1, dtype=torch.int32, device=small.device),
        )
        gather_rows(small, slots, 0, 1, peer)
        scatter_rows(small, slots, 0, 1, peer)
        copy_to_peer(small, slots, peer.data_ptr(), 1, slots, 0, 1)
        torch.cuda.current_stream(buffer.device).synchronize()


def _check_pool(
    buffer: torch.Tensor, slots: torch.Tensor, layer_start: int, layer_stop: int
) -> None:
    if buffer.dim() != 5 or not buffer.is_contiguous():
        raise ValueError(f"a pool is one contiguous 5-D tensor, not {tuple(buffer.shape)}")
    if not 0 <= layer_start <= layer_stop <= buffer.shape[0]:
        raise ValueError(f"layers [{layer_start}, {layer_stop}) are not of {buffer.shape[0]}")
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots are int32 or int64 [n], not {slots.dtype} {tuple(slots.shape)}")
    if slots.device != buffer.device:
        raise ValueError(f"slots are on {slots.device}, the pool is on {buffer.device}")


def _view_packed(
    buffer: torch.Tensor,
    slots: torch.Tensor,
    layer_start: int,
    layer_stop: int,
    data: torch.Tensor,
    num_parts: int = 1,
) -> torch.Tensor:
    """Check the arguments and view the packed side as bytes."""
    _check_pool(buffer, slots, layer_start, layer_stop)
    size = (
        (layer_stop - layer_start)
        * buffer.shape[1]
        * len(slots)
        * count_row_bytes(buffer)
        * num_parts
    )
    if not data.is_contiguous() or data.numel() * data.element_size() != size:
        raise ValueError(
            f"packed data must be {size} contiguous bytes, not {tuple(data.shape)} of {data.dtype}"
        )
    if data.device != buffer.device:
        raise ValueError(f"packed data is on {data.device}, the pool is on {buffer.device}")
    return data.view(-1).view(torch.uint8)


def _check_slots(slots: torch.Tensor, num_slots: int) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = slots.numpy().astype(np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < num_slots:
        raise IndexError(f"slots {array.min()} to {array.max()} are not of {num_slots}")
    return array


def _view_slabs(buffer: torch.Tensor, layer_start: int, layer_stop: int) -> Slabs:
    """Return the bytes ``[num_slots, row]`` of each vector of each layer."""
    layers = buffer[layer_start:layer_stop].view(-1).view(torch.int8).numpy()
    return list(layers.reshape(-1, buffer.shape[2], count_row_bytes(buffer)))


def _view_packed_slabs(packed: torch.Tensor, slabs: Slabs, slots: torch.Tensor) -> Slabs:
    if not slabs:
        return []
    return list(packed.numpy().view(np.int8).reshape(len(slabs), len(slots), -1))


def _view_runs(rows: npt.NDArray[np.int8], run: int) -> npt.NDArray[np.void]:
    """View ``[slots, row]`` as ``[slots // run]`` opaque items, so each is one memory copy."""
    whole = rows[: len(rows) // run * run]
    return whole.reshape(-1, run * rows.shape[1]).view(f"V{run * rows.shape[1]}")[:, 0]


def _split_runs(
    slots: npt.NDArray[np.int64],
) -> Iterator[tuple[npt.NDArray[np.int64], slice, int]]:
    """Divide the slots into parts: (index in units of ``run`` slots, slice of tokens, run)."""
    for run in _RUNS:
        head = int(-slots[0] % run) if len(slots) else 0
        body = (len(slots) - head) // run * run
        if body <= 0:
            continue
        blocks = slots[head : head + body].reshape(-1, run)
        first = blocks[:, 0]
        if (first % run == 0).all() and (blocks - first[:, None] == np.arange(run)).all():
            if head:
                yield slots[:head], slice(0, head), 1
            yield first // run, slice(head, head + body), run
            if head + body < len(slots):
                yield slots[head + body :], slice(head + body, len(slots)), 1
            return
    if len(slots):
        yield slots, slice(0, len(slots)), 1
