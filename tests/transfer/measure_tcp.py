"""The tcp backend beside a plain socket, in turns, between two processes over loopback.

    python tests/transfer/measure_tcp.py --page-sizes 1,16,64 --connections 1,2,4 --rounds 9

Pages are scattered at random on both sides; rates are from the first ``send`` until the receiver is
DONE, in GB/s.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transfer_helpers import Pool, make_pool, node_info, reservation

from pd.transfer.base import TransferState
from pd.transfer.tcp import TcpManager

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LAYERS, HEADS, DIM, TOKENS = 16, 8, 64, 8192
PLAIN_BYTES = 1 << 20


def pool_of(page_size: int) -> Pool:
    return make_pool(TOKENS, page_size, layers=LAYERS, heads=HEADS, dim=DIM)


def decode(pipe: Connection) -> None:
    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    rng = np.random.default_rng(1)
    while (page_size := pipe.recv()) is not None:
        pool = pool_of(page_size)
        manager = TcpManager(pool, "D")
        pipe.send(node_info("D", "decode", manager, pool))
        memory = pool.buffer.view(-1).view(torch.uint8).numpy().data
        while (epoch := pipe.recv()) is not None:
            if epoch == 0:
                receive_plain(listener, memory)
                continue
            pages = rng.permutation(TOKENS // page_size).astype(np.int32)
            receiver = manager.receiver("P", bytes(16), epoch, pages, 0, TOKENS)
            pipe.send(reservation(receiver, bytes(16), epoch, 0))
            receiver.commit(pipe.recv())
            wait(receiver)
            pipe.send(True)
        manager.close()


def receive_plain(listener: socket.socket, memory: memoryview) -> None:
    sock, _ = listener.accept()
    with sock:
        done = 0
        while done < len(memory):
            done += sock.recv_into(memory[done : done + PLAIN_BYTES])
        sock.sendall(b"!")


def send_plain(address: Any, memory: memoryview) -> float:
    with socket.create_connection(address) as sock:
        begun, done = time.perf_counter(), 0
        while done < len(memory):
            done += sock.send(memory[done : done + PLAIN_BYTES])
        sock.recv(1)
        return len(memory) / (time.perf_counter() - begun) / 1e9


def wait(end: Any) -> None:
    while end.poll() is TransferState.ACTIVE:
        time.sleep(0.001)
    assert end.poll() is TransferState.DONE, end.error


def send_room(pipe: Connection, manager: TcpManager, pages: Any, epoch: int) -> float:
    pipe.send(epoch)
    asked = pipe.recv()
    begun = time.perf_counter()
    sender = manager.sender("D", asked, pages, TOKENS)
    for layer in range(0, LAYERS, 4):
        sender.send(0, TOKENS, layer, layer + 4)
    sender.finish()
    pipe.send(sender.bytes_sent)
    wait(sender)
    pipe.recv()
    return sender.bytes_sent / (time.perf_counter() - begun) / 1e9


def measure(pipe: Connection, address: Any, page_size: int, connections: list[int], n: int) -> None:
    pipe.send(page_size)
    info, pool = pipe.recv(), pool_of(page_size)
    memory = pool.buffer.view(-1).view(torch.uint8).numpy().data
    managers = {c: TcpManager(pool, "P", connections=c) for c in connections}
    rates: dict[str, list[float]] = {}
    rng = np.random.default_rng(2)
    epoch = 0
    for manager in managers.values():
        manager.connect(info)
    for _ in range(n):
        pipe.send(0)
        rates.setdefault("plain", []).append(send_plain(address, memory))
        for count, manager in managers.items():
            epoch += 1
            pages = rng.permutation(TOKENS // page_size).astype(np.int32)
            rates.setdefault(f"{count} conn", []).append(send_room(pipe, manager, pages, epoch))
    pipe.send(None)
    shown = (f"{k} median {statistics.median(v):.2f} best {max(v):.2f}" for k, v in rates.items())
    print(f"page size {page_size:2d}:", " | ".join(shown), flush=True)
    for manager in managers.values():
        manager.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-sizes", default="1,16,64")
    parser.add_argument("--connections", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs,), daemon=True)
    process.start()
    address = pipe.recv()
    for page_size in map(int, args.page_sizes.split(",")):
        measure(pipe, address, page_size, list(map(int, args.connections.split(","))), args.rounds)
    pipe.send(None)
    process.join()


if __name__ == "__main__":
    main()
