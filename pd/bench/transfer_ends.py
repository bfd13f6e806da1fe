"""The two ends of a measurement: P pushes rooms as a prefill node would, and D receives them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from pd.bench.transfer_ceiling import make_ceiling, make_ceiling_target
from pd.bench.transfer_control import SOURCE, TARGET
from pd.bench.transfer_spec import TransferRates, TransferSpec
from pd.core.errors import SetupError, TransferError
from pd.core.messages import Reservation
from pd.core.node_info import NodeInfo
from pd.core.sampling_params import SamplingParams
from pd.engine.kv_pool import KVPool
from pd.prefill_node.outgoing import Chunk, OutgoingRoom, PromptCost
from pd.scheduling.request import Request
from pd.transfer import make_transfer_manager
from pd.transfer.base import TransferState
from pd.transfer.tcp.manager import DEFAULT_CONNECTIONS, TcpManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd.bench.transfer_ceiling import CeilingTarget
    from pd.bench.transfer_control import Control
    from pd.transfer.base import Receiver, Sender, TransferManager
    from pd.transfer.kv_buffer import IntArray

_ROOM = b"pd-bench-transfe"
# Share of the measured time that waiting for an end may add, and bounds of the polling interval.
_POLL_SHARE = 1 / 200
_POLL_SECONDS = (50e-6, 2e-3)
_MAX_SECONDS = 60.0
_MAX_REPEATS = 100


class End:
    """A pool, a manager and the pages of each repeat."""

    def __init__(
        self, spec: TransferSpec, instance: str, device: str, host: str, key: bytes | None
    ):
        check_device(device)
        torch.set_num_threads(1)
        self.spec, self.instance = spec, instance
        self.pool = KVPool(spec.kv, spec.num_pages, device)
        self.manager = make_manager(spec, self.pool, instance, host, key)
        self._random = np.random.default_rng(len(instance) + spec.page_size + ord(instance[-1]))

    def make_info(self) -> NodeInfo:
        return NodeInfo(
            instance_id=self.instance,
            role="prefill" if self.instance == SOURCE else "decode",
            model_id=self.spec.shape.name,
            kv=self.spec.kv,
            endpoint="tcp://127.0.0.1:0",
            bootstrap="",
            transfers=self.manager.addresses(),
        )

    def draw_pages(self) -> IntArray:
        """Draw a new page table for one room."""
        count = self.spec.num_pages
        if self.spec.layout == "contiguous":
            return np.arange(count, dtype=np.int32)
        return self._random.permutation(count).astype(np.int32)

    def hash_tokens(self, pages: IntArray) -> bytes:
        """Hash the bytes of the tokens; their pages do not matter."""
        spec, pool = self.spec, self.pool
        tokens = np.arange(spec.tokens)
        slots = pages[tokens // spec.page_size].astype(np.int64) * spec.page_size
        index = torch.from_numpy(slots + tokens % spec.page_size).to(pool.device)
        total = hashlib.blake2b(digest_size=16)
        for plane in pool.planes:
            for slab in plane.buffer.flatten(0, 1):
                rows = slab.index_select(0, index).view(torch.uint8)
                total.update(rows.cpu().numpy())
        return total.digest()

    def synchronize(self) -> None:
        if self.pool.memory.is_cuda:
            torch.cuda.synchronize(self.pool.device)


class SourceEnd(End):
    """P, which measures the times."""

    def __init__(self, spec: TransferSpec, control: Control, key: bytes | None) -> None:
        super().__init__(spec, SOURCE, spec.source_device, control.host, key)
        self._control, self._key = control, key
        # Any bits will do, and drawing 8 bytes at a time is faster than 2.
        self.pool.memory.view(torch.int64).random_()
        self._interval = 1e-3

    def measure(self, progress: Callable[[str], None]) -> TransferRates:
        """Measure transfers and their ceiling in turns, after one of each as a warm-up. A last
        transfer compares the bytes."""
        with contextlib.closing(self.manager):
            control = self._control
            opened = control.call("open", spec=msgspec.to_builtins(self.spec))
            self.spec = spec = replace(self.spec, target_device=opened["target_device"])
            peer = msgspec.convert(opened["info"], NodeInfo)
            self.manager.connect(peer)
            control.call("connect", info=msgspec.to_builtins(self.make_info()))
            connections = (
                (spec.connections or DEFAULT_CONNECTIONS) if spec.backend == "tcp" else None
            )
            ceiling = make_ceiling(spec, self.pool, control, self._key, connections or 1, peer)
            self.push_room(verify=False)
            ceiling.measure()
            rates: list[float] = []
            ceilings: list[float] = []
            begun = time.monotonic()
            while len(rates) < spec.repeats or (
                len(rates) < _MAX_REPEATS and time.monotonic() - begun < spec.seconds
            ):
                ceilings.append(ceiling.measure())
                rates.append(self.push_room(verify=False))
                if len(rates) <= spec.repeats:
                    progress(
                        f"{spec}: {len(rates)}/{spec.repeats}: {rates[-1]:.2f} GB/s, "
                        f"{ceiling.name} {ceilings[-1]:.2f}"
                    )
            self.push_room(verify=True)
            ceiling.close()
            devices = sorted({describe_device(spec.source_device), opened["device"]} - {""})
            control.call("close")
            return TransferRates(spec, ceiling.name, rates, ceilings, connections, devices)

    def push_room(self, *, verify: bool) -> float:
        """Push one room, from the first ``send`` until all of it is in D's pages; return GB/s.

        D says when it has everything. With a backend whose stores D cannot see, the room is
        complete when P has seen the last store complete, which is the meaning of DONE.
        """
        spec, pages = self.spec, self.draw_pages()
        reply = self._control.call("reserve", clear=verify)["reservation"]
        reservation = msgspec.convert(reply, Reservation)
        sender = self.manager.sender(TARGET, reservation, pages, spec.tokens)
        self.synchronize()
        begun = time.perf_counter()
        if spec.pattern == "nodes":
            send_as_nodes(spec, sender)
        else:
            send_groups(spec, sender)
        sender.finish()
        wait_done(sender, self._interval)
        stored = time.perf_counter() - begun
        fields = {"num_bytes": sender.bytes_sent, "interval": self._interval}
        seen = self._control.call("commit", **fields)["bytes_received"]
        seconds = time.perf_counter() - begun if seen else stored
        while not sender.drained():
            time.sleep(self._interval)
        low, high = _POLL_SECONDS
        self._interval = min(max(seconds * _POLL_SHARE, low), high)
        if verify and self._control.call("digest")["digest"] != self.hash_tokens(pages):
            raise TransferError(f"{spec}: the received bytes differ from those that were sent")
        return spec.num_bytes / seconds / 1e9


class TargetEnd:
    """D, which serves the calls of P for one measurement after another."""

    def __init__(self, control: Control, device: str, key: bytes | None) -> None:
        self._control, self._device, self._key = control, device, key
        self._end: End | None = None
        self._target: CeilingTarget | None = None
        self._receiver: Receiver | None = None
        self._pages: IntArray = np.empty(0, dtype=np.int32)
        self._epoch = 0

    def serve(self) -> None:
        """Answer calls until P closes the connection."""
        operations = {
            name: getattr(self, f"_handle_{name}")
            for name in ("open", "connect", "reserve", "commit", "digest", "ceiling", "step")
        }
        self._control.serve_calls({**operations, "close": self._handle_close})
        self._handle_close({})

    @property
    def _opened(self) -> End:
        if self._end is None:
            raise SetupError("nothing is open")
        return self._end

    def _handle_open(self, message: dict[str, Any]) -> dict[str, Any]:
        self._handle_close({})
        spec = replace(msgspec.convert(message["spec"], TransferSpec), target_device=self._device)
        self._end = End(spec, TARGET, self._device, self._control.host, self._key)
        info = msgspec.to_builtins(self._end.make_info())
        device = describe_device(self._device)
        return {"info": info, "device": device, "target_device": self._device}

    def _handle_connect(self, message: dict[str, Any]) -> dict[str, Any]:
        self._opened.manager.connect(msgspec.convert(message["info"], NodeInfo))
        return {}

    def _handle_reserve(self, message: dict[str, Any]) -> dict[str, Any]:
        end = self._opened
        if message["clear"]:
            end.pool.memory.zero_()
            end.synchronize()
        self._epoch += 1
        self._pages = end.draw_pages()
        self._receiver = end.manager.receiver(
            SOURCE, _ROOM, self._epoch, self._pages, (0,), end.spec.tokens
        )
        reservation = Reservation(
            to=SOURCE,
            sender=TARGET,
            room=_ROOM,
            epoch=self._epoch,
            cached=(0,),
            destination=self._receiver.destination,
        )
        return {"reservation": msgspec.to_builtins(reservation, builtin_types=(bytes,))}

    def _handle_commit(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._receiver is not None
        self._receiver.commit(message["num_bytes"])
        wait_done(self._receiver, message["interval"])
        return {"bytes_received": self._receiver.bytes_received}

    def _handle_digest(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"digest": self._opened.hash_tokens(self._pages)}

    def _handle_ceiling(self, message: dict[str, Any]) -> dict[str, Any]:
        end = self._opened
        self._target = make_ceiling_target(
            end.spec, end.pool, self._control, self._key, message["connections"]
        )
        return self._target.describe()

    def _handle_step(self, _: dict[str, Any]) -> dict[str, Any]:
        if self._target is None:
            raise SetupError("no ceiling is open")
        self._target.run_step()
        return {}

    def _handle_close(self, _: dict[str, Any]) -> dict[str, Any]:
        if self._target is not None:
            self._target.close()
        if self._end is not None:
            self._end.manager.close()
        self._target = self._end = self._receiver = None
        return {}


def send_groups(spec: TransferSpec, sender: Sender) -> None:
    """Send each chunk in groups of layers."""
    for start in range(0, spec.tokens, spec.chunk):
        stop = min(start + spec.chunk, spec.tokens)
        for layer in range(0, spec.shape.layers, spec.layer_group):
            sender.send(start, stop, layer, min(layer + spec.layer_group, spec.shape.layers))


def send_as_nodes(spec: TransferSpec, sender: Sender) -> None:
    """Send in the portions that a prefill node chooses during its forward pass, which takes no time
    here."""
    shape, prompt = spec.shape, np.zeros(spec.tokens, np.int32)
    cost = PromptCost(shape.layers, spec.kv.token_bytes, shape.token_flops, shape.pair_flops)
    request = Request("", _ROOM, b"", prompt, SamplingParams(max_tokens=1))
    outgoing = OutgoingRoom(request, cost, sender=sender)
    for start in range(0, spec.tokens, spec.chunk):
        stop = min(start + spec.chunk, spec.tokens)
        chunk = Chunk(outgoing, start, stop, spec.tokens)
        for layer in range(shape.layers):
            chunk.layers_done(layer, layer + 1)
    outgoing.push_until(spec.tokens)


def wait_done(end: Sender | Receiver, interval: float) -> None:
    """Poll every ``interval`` seconds, as a node's loop does. Raises the error of the end."""
    deadline = time.monotonic() + _MAX_SECONDS
    while (state := end.poll()) is TransferState.ACTIVE:
        if time.monotonic() > deadline:
            raise TransferError(f"the transfer was not over after {_MAX_SECONDS:g} s")
        time.sleep(interval)
    if state is TransferState.FAILED:
        raise end.error or TransferError("the transfer failed")


def make_manager(
    spec: TransferSpec, pool: KVPool, instance: str, host: str, key: bytes | None
) -> TransferManager:
    """Make the manager as a node does, except for the number of tcp connections."""
    if spec.backend == "tcp" and spec.connections:
        return TcpManager(pool, instance, host, cluster_key=key, connections=spec.connections)
    return make_transfer_manager(spec.backend, pool, instance, host, cluster_key=key)


def check_device(device: str) -> None:
    """Raise SetupError unless the device exists."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SetupError(f"--device {device}: torch sees no CUDA device here; use --device cpu")
    count, index = torch.cuda.device_count(), torch.device(device).index or 0
    if index >= count:
        raise SetupError(f"--device {device}: there are {count} CUDA devices here")
    torch.cuda.set_device(index)


def describe_device(device: str) -> str:
    return "" if device == "cpu" else torch.cuda.get_device_name(torch.device(device))
