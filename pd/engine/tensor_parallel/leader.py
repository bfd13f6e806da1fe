"""Rank 0's side: starts the workers, sends them each step, and notices when one ends."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import mmap
import os
import queue
import selectors
import socket
import subprocess
import tempfile
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import torch

from pd.core.errors import NodeFailedError, SetupError
from pd.engine.tensor_parallel.group import ProcessGroup
from pd.engine.tensor_parallel.messages import (
    Built,
    ForgetPages,
    ForwardStep,
    Joining,
    MoveTokens,
    PackedTables,
    PageCapacity,
    RankChannel,
    RankFailed,
    RankMessage,
    RestorePages,
    SavePages,
    StartWorker,
)
from pd.kernels.cuda_ipc import CudaIpc
from pd.util.children import hold_signals, module_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.node_info import Plane
    from pd.engine.eagle import EagleWriter
    from pd.engine.forward_item import ForwardItem
    from pd.engine.model_runner import CapturedGraphs, ModelRunner
    from pd.engine.step_outcome import StepOutcome

    IntArray = npt.NDArray[np.int32]
    M = TypeVar("M", bound=RankMessage)

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# Time for noticing the end of a worker and for handling its report.
_NOTICE_SECONDS = 1.0
# Settings that are secret, or that an engine does not use.
_NOT_FOR_WORKERS = ("cluster_key", "fake_script", "kv_events_config")


class _Worker:
    """A worker process.

    Attributes:
        inbox: its messages, and None after the last one.
        memory: descriptor of a file that holds its KV pool on a CPU.
    """

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.channel = rank, RankChannel(ours)
        self.inbox: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self.memory = os.memfd_create(f"pd-kv-rank-{rank}")
        descriptors = [theirs.fileno(), self.memory]
        with theirs, hold_signals():
            # Standard output belongs to the node, and so does a terminal's Ctrl-C.
            self.process = subprocess.Popen(
                module_command("pd.engine.tensor_parallel.worker", *descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
            )

    def close(self) -> None:
        """Close the channel and the memory. Call :meth:`stop` first."""
        self.channel.close()
        if self.memory >= 0:
            os.close(self.memory)
        self.memory = -1

    def stop(self) -> None:
        """Wait until the process has ended. It ends because its channel is shut down."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Leader:
    """The workers of one node. They end with it. One thread at a time sends them steps.

    Args:
        extra_planes: planes of the KV in addition to the model's.

    Attributes:
        group: the process group, as rank 0.
        failure: the reason why the group cannot compute any more; None while it can.
        on_failure: called once, from any thread, with that reason.

    Raises:
        SetupError: a worker could not start.
    """

    group: ProcessGroup

    def __init__(
        self, config: NodeConfig, device: torch.device, extra_planes: Sequence[Plane] = ()
    ) -> None:
        self.failure: str | None = None
        self._failed = threading.Event()
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._page_size = config.page_size
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._forgotten: deque[int] = deque()
        self._closing = False
        self._ipc: CudaIpc | None = None
        self._mapped: list[int] = []
        self._shared: list[torch.Tensor] = []
        self._directory = tempfile.TemporaryDirectory(prefix="pd-tp-")
        self._workers = [_Worker(rank) for rank in range(1, config.tp_size)]
        self._reader = threading.Thread(target=self._read_messages, name="tp-reader", daemon=True)
        self._reader.start()
        try:
            self._start_workers(config, device, extra_planes)
        except BaseException:
            self.close()
            raise

    def _start_workers(
        self, config: NodeConfig, device: torch.device, extra_planes: Sequence[Plane]
    ) -> None:
        settings = dataclasses.asdict(config) | {"model": str(config.model)}
        if config.speculative_draft_model is not None:
            settings["speculative_draft_model"] = str(config.speculative_draft_model)
        for name in _NOT_FOR_WORKERS:
            del settings[name]
        rendezvous = f"{self._directory.name}/rendezvous"
        threads = max(1, torch.get_num_threads() // config.tp_size)
        level = logging.getLogger().getEffectiveLevel()
        planes = list(extra_planes)
        for worker in self._workers:
            self._send_message(
                worker,
                StartWorker(
                    settings, planes, worker.rank, config.tp_size, rendezvous, threads, level
                ),
            )
        torch.set_num_threads(threads)
        for worker in self._workers:
            self._receive_message(worker, Joining)
        try:
            self.group = ProcessGroup(0, config.tp_size, rendezvous, device)
        except RuntimeError as error:
            # A rank ended while the others waited for it. The reader may learn of that first.
            self._failed.wait(_NOTICE_SECONDS)
            raise SetupError(
                self.failure or f"the tensor-parallel ranks cannot connect: {error}"
            ) from error

    # ---- building

    def agree_on_pages(self, num_pages: int) -> int:
        """Return the smallest number of pages for which any rank has memory; ``num_pages`` is rank
        0's number."""
        least = min(
            num_pages, *(self._receive_message(w, PageCapacity).num_pages for w in self._workers)
        )
        for worker in self._workers:
            self._send_message(worker, PageCapacity(least))
        return least

    def wait_until_built(self) -> list[Built]:
        """Wait until all workers are ready for steps."""
        return [self._receive_message(worker, Built) for worker in self._workers]

    def map_pools(self, all_built: list[Built], memory: torch.Tensor) -> list[int]:
        """Map the workers' KV pools.

        Args:
            all_built: result of :meth:`wait_until_built`.
            memory: this rank's memory of the planes that all ranks have. The others have the same
                size.

        Returns:
            The address of each rank's pool, rank 0 first, valid until :meth:`close`.
        """
        addresses = [memory.data_ptr()]
        for worker, built in zip(self._workers, all_built, strict=True):
            if memory.is_cuda:
                ipc = self._ipc = self._ipc or CudaIpc(memory.device.index)
                self._mapped.append(ipc.map_memory(built.handle))
                addresses.append(self._mapped[-1] + built.offset)
            else:
                shared = torch.frombuffer(
                    mmap.mmap(worker.memory, memory.nbytes), dtype=torch.uint8
                )
                self._shared.append(shared)
                addresses.append(shared.data_ptr())
        return addresses

    def _send_message(self, worker: _Worker, message: RankMessage) -> None:
        try:
            worker.channel.send_message(message)
        except OSError as error:
            while worker.inbox.get() is not None:
                pass  # its last message may give the reason
            raise SetupError(str(self.failure)) from error

    def _receive_message(self, worker: _Worker, kind: type[M]) -> M:
        message = worker.inbox.get()
        if message is None:
            raise SetupError(self.failure or "the tensor-parallel workers were stopped")
        assert isinstance(message, kind), f"rank {worker.rank} sent {message} for a {kind.__name__}"
        return message

    # ---- steps

    def announce_step(
        self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None
    ) -> None:
        """Send the workers a step that rank 0 is about to launch.

        Raises:
            NodeFailedError: a worker has ended.
        """
        count = 0 if previous_tokens is None else len(previous_tokens)
        self._send_to_all(ForwardStep.pack_items(items, self._page_size, count))
        if previous_tokens is not None:
            self.group.broadcast(previous_tokens)

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Tell the workers to move KV of tokens as rank 0 is about to do.

        Raises:
            NodeFailedError: a worker has ended.
        """
        self._send_to_all(MoveTokens(*to.shape))
        self.group.broadcast(torch.stack((source, to)))

    def save_pages(self, pages: IntArray) -> int:
        """Tell the workers to copy pages to host memory. Returns the key of the copies."""
        key = next(self._keys)
        self._send_to_all(SavePages(key, PackedTables.pack_tables(pages)))
        return key

    def restore_pages(self, key: int, pages: IntArray) -> None:
        """Tell the workers to write the last pages of these copies into ``pages``."""
        self._send_to_all(RestorePages(key, PackedTables.pack_tables(pages)))

    def forget_pages(self, key: int) -> None:
        """Tell the workers, with the next message, to drop these copies. Any thread may call this,
        and finalizers may, too."""
        self._forgotten.append(key)

    def _send_to_all(self, message: RankMessage) -> None:
        """Send a message to all workers. They handle messages in order."""
        if self.failure is not None:
            raise NodeFailedError(self.failure)
        channel = self._workers[0].channel
        data = channel.encode_message(message)
        while self._forgotten:
            data = channel.encode_message(ForgetPages(self._forgotten.popleft())) + data
        for worker in self._workers:
            try:
                worker.channel.send_encoded(data)
            except OSError as error:
                raise NodeFailedError(self._describe_exit(worker)) from error

    # ---- ends

    def fail_group(self, reason: str) -> None:
        """End the group, because the ranks no longer do the same. Only the first reason is kept."""
        with self._lock:
            if self._closing or self.failure is not None:
                return
            self.failure = reason
        self._failed.set()
        # NOTE: we call it before we abort anything. Otherwise the remains of an aborted step could
        # be taken for its result. The callback may wait for a lock whose holder waits for that
        # step.
        callback = threading.Thread(
            target=self.on_failure, args=(reason,), name="tp-failure", daemon=True
        )
        callback.start()
        callback.join(_NOTICE_SECONDS)
        self._shut_down_channels()
        if hasattr(self, "group"):
            self.group.abort()

    def on_step_error(self, error: Exception) -> None:
        """End the group after an error in a step. If a worker has ended, that is the reason."""
        if not self._failed.wait(_NOTICE_SECONDS):
            # The workers compute a step without rank 0.
            self.fail_group(f"rank 0 could not launch a step: {error}")

    def close(self) -> None:
        """End the workers. You may launch no step and use no pool of theirs afterwards."""
        with self._lock:
            self._closing = True
        self._shut_down_channels()
        if hasattr(self, "group"):
            self.group.abort()
        for worker in self._workers:
            worker.stop()
        self._reader.join()
        for address in self._mapped:
            assert self._ipc is not None
            self._ipc.unmap_memory(address)
        self._mapped.clear()
        for worker in self._workers:
            worker.close()
        self._directory.cleanup()

    def _shut_down_channels(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.socket.shutdown(socket.SHUT_RDWR)

    def _read_messages(self) -> None:
        """Fill the inboxes until every worker has ended."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take_message(key.data):
                        selector.unregister(key.fileobj)

    def _take_message(self, worker: _Worker) -> bool:
        """Read one message. Returns False after the last one."""
        try:
            message = worker.channel.receive_message()
        except EOFError:
            self.fail_group(self._describe_exit(worker))
        else:
            if not isinstance(message, RankFailed):
                worker.inbox.put(message)
                return True
            self.fail_group(f"tensor-parallel rank {worker.rank} failed: {message.reason}")
        worker.inbox.put(None)
        return False

    def _describe_exit(self, worker: _Worker) -> str:
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = worker.process.wait(1.0)
        how = "closed its connection" if status is None else f"ended with status {status}"
        return f"tensor-parallel rank {worker.rank} (process {worker.process.pid}) {how}"


class LeadingRunner:
    """The :class:`pd.engine.model_runner.ModelRunner` of rank 0. All ranks compute its steps."""

    def __init__(self, runner: ModelRunner, leader: Leader) -> None:
        self._runner, self._leader = runner, leader

    @property
    def eagle(self) -> EagleWriter | None:
        """See :class:`pd.engine.model_runner.ModelRunner`. Only this rank has one."""
        return self._runner.eagle

    @property
    def graphs(self) -> CapturedGraphs | None:
        """See :class:`pd.engine.model_runner.ModelRunner`."""
        return self._runner.graphs

    @property
    def mixed_graphs(self) -> CapturedGraphs | None:
        """See :class:`pd.engine.model_runner.ModelRunner`."""
        return self._runner.mixed_graphs

    @property
    def num_replays(self) -> int:
        """See :class:`pd.engine.model_runner.ModelRunner`."""
        return self._runner.num_replays

    @property
    def takes_unread(self) -> bool:
        """Always false, because the other ranks learn the outcome of a step only after the host has
        read it."""
        return False

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """See :meth:`pd.engine.kv_pool.KVPool.move_tokens`. All ranks do it.

        Raises:
            NodeFailedError: a worker has ended.
        """
        try:
            self._leader.move_tokens(source, to)
            self._runner.move_tokens(source, to)
        except Exception as error:  # after any error the ranks no longer do the same
            self._leader.on_step_error(error)
            raise NodeFailedError(str(self._leader.failure)) from error

    def drop_graphs(self) -> None:
        """See :meth:`pd.engine.model_runner.ModelRunner.drop_graphs`. Only this rank does it."""
        self._runner.drop_graphs()

    @torch.inference_mode()
    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`, without ``outcome``.

        Raises:
            NodeFailedError: a worker has ended.
        """
        assert outcome is None
        try:
            self._leader.announce_step(items, previous_tokens)
            return self._runner.forward(items, on_layers_done, previous_tokens)
        except Exception as error:  # after any error the ranks no longer do the same
            self._leader.on_step_error(error)
            raise NodeFailedError(str(self._leader.failure)) from error
