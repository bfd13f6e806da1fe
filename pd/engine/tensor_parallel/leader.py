"""The side of rank 0: starts the workers, sends them each step, and notices when one is gone."""

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

from pd.core.children import module_command, signals_held_back
from pd.core.errors import NodeFailedError, SetupError
from pd.engine.tensor_parallel.group import ProcessGroup
from pd.engine.tensor_parallel.messages import (
    Built,
    ForgetPages,
    ForwardStep,
    Joining,
    MoveTokens,
    PageCapacity,
    RankChannel,
    RankFailed,
    RankMessage,
    RestorePages,
    SavePages,
    StartWorker,
    packed,
)
from pd.kernels.cuda_ipc import CudaIpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.node_info import Plane
    from pd.engine.eagle import EagleWriter
    from pd.engine.model_runner import ForwardItem, ModelRunner
    from pd.engine.step_graphs import DecodeGraphs, MixedGraphs
    from pd.engine.step_outcome import StepOutcome

    IntArray = npt.NDArray[np.int32]
    M = TypeVar("M", bound=RankMessage)

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
# Seconds that the end of a worker may take to be noticed, and its report to be handled.
_NOTICE_SECONDS = 1.0
# Settings that an engine does not use, or that are secret.
_NOT_FOR_WORKERS = ("cluster_key", "fake_script", "kv_events_config")


class _Worker:
    """A worker process. Its messages are in ``inbox``, None after the last. ``memory`` is a file
    that holds its KV pool on a CPU."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank, self.channel = rank, RankChannel(ours)
        self.inbox: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self.memory = os.memfd_create(f"pd-kv-rank-{rank}")
        descriptors = [theirs.fileno(), self.memory]
        with theirs, signals_held_back():
            # Standard output belongs to the node itself, and so does a terminal's Ctrl-C.
            self.process = subprocess.Popen(
                module_command("pd.engine.tensor_parallel.worker", *descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
            )

    def close(self) -> None:
        """Close the channel and the memory. Called after :meth:`stop`."""
        self.channel.close()
        if self.memory >= 0:
            os.close(self.memory)
        self.memory = -1

    def stop(self) -> None:
        """Wait until the process has ended; it ends because its channel is shut down."""
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Leader:
    """The workers of one node, which end with it. One thread at a time sends them steps.

    Args:
        extra_planes: planes of the KV beside the model's.

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
        self._reader = threading.Thread(target=self._read, name="tp-reader", daemon=True)
        self._reader.start()
        try:
            self._start(config, device, extra_planes)
        except BaseException:
            self.close()
            raise

    def _start(
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
            self._send(
                worker,
                StartWorker(
                    settings, planes, worker.rank, config.tp_size, rendezvous, threads, level
                ),
            )
        torch.set_num_threads(threads)
        for worker in self._workers:
            self._receive(worker, Joining)
        try:
            self.group = ProcessGroup(0, config.tp_size, rendezvous, device)
        except RuntimeError as error:
            # A rank that ended while the others waited for it, which the reader may know first.
            self._failed.wait(_NOTICE_SECONDS)
            raise SetupError(
                self.failure or f"the tensor-parallel ranks cannot connect: {error}"
            ) from error

    # ---- building

    def agree_on_pages(self, num_pages: int) -> int:
        """Return the least number of pages that a rank has memory for; ``num_pages`` is that of
        rank 0."""
        least = min(num_pages, *(self._receive(w, PageCapacity).num_pages for w in self._workers))
        for worker in self._workers:
            self._send(worker, PageCapacity(least))
        return least

    def wait_built(self) -> list[Built]:
        """Wait until all workers are ready for steps."""
        return [self._receive(worker, Built) for worker in self._workers]

    def map_pools(self, all_built: list[Built], memory: torch.Tensor) -> list[int]:
        """Map the workers' KV pools.

        Args:
            all_built: result of :meth:`wait_built`.
            memory: this rank's memory of the planes that all ranks have; the others' is of the
                same size.

        Returns:
            The address of each rank's pool, that of rank 0 first, valid until :meth:`close`.
        """
        addresses = [memory.data_ptr()]
        for worker, built in zip(self._workers, all_built, strict=True):
            if memory.is_cuda:
                ipc = self._ipc = self._ipc or CudaIpc(memory.device.index)
                self._mapped.append(ipc.open(built.handle))
                addresses.append(self._mapped[-1] + built.offset)
            else:
                shared = torch.frombuffer(
                    mmap.mmap(worker.memory, memory.nbytes), dtype=torch.uint8
                )
                self._shared.append(shared)
                addresses.append(shared.data_ptr())
        return addresses

    def _send(self, worker: _Worker, message: RankMessage) -> None:
        try:
            worker.channel.send(message)
        except OSError as error:
            while worker.inbox.get() is not None:
                pass  # its last message may give the reason
            raise SetupError(str(self.failure)) from error

    def _receive(self, worker: _Worker, kind: type[M]) -> M:
        message = worker.inbox.get()
        if message is None:
            raise SetupError(self.failure or "the tensor-parallel workers were stopped")
        assert isinstance(message, kind), f"rank {worker.rank} sent {message} for a {kind.__name__}"
        return message

    # ---- steps

    def announce(self, items: Sequence[ForwardItem], previous_tokens: torch.Tensor | None) -> None:
        """Send the workers a step that rank 0 is about to launch.

        Raises:
            NodeFailedError: a worker is gone.
        """
        count = 0 if previous_tokens is None else len(previous_tokens)
        self._send_to_all(ForwardStep.of(items, self._page_size, count))
        if previous_tokens is not None:
            self.group.broadcast(previous_tokens)

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Let the workers move KV of tokens as rank 0 is about to do.

        Raises:
            NodeFailedError: a worker is gone.
        """
        self._send_to_all(MoveTokens(len(to)))
        self.group.broadcast(torch.stack((source, to)))

    def save_pages(self, pages: IntArray) -> int:
        """Let the workers copy pages to host memory; returns the key of the copies."""
        key = next(self._keys)
        self._send_to_all(SavePages(key, packed(pages)))
        return key

    def restore_pages(self, key: int, pages: IntArray, first: int) -> None:
        """Let the workers write these copies, from page ``first`` on, into ``pages``."""
        self._send_to_all(RestorePages(key, packed(pages), first))

    def forget_pages(self, key: int) -> None:
        """Let the workers drop these copies, with the next message that they get. May be called
        from any thread and from a finalizer."""
        self._forgotten.append(key)

    def _send_to_all(self, message: RankMessage) -> None:
        """Send a message to all workers, which handle messages in order."""
        if self.failure is not None:
            raise NodeFailedError(self.failure)
        channel = self._workers[0].channel
        data = channel.encode(message)
        while self._forgotten:
            data = channel.encode(ForgetPages(self._forgotten.popleft())) + data
        for worker in self._workers:
            try:
                worker.channel.send_encoded(data)
            except OSError as error:
                raise NodeFailedError(self._exit_reason(worker)) from error

    # ---- ends

    def fail(self, reason: str) -> None:
        """End the group, because the ranks do not do the same any more. The first reason is
        kept."""
        with self._lock:
            if self._closing or self.failure is not None:
                return
            self.failure = reason
        self._failed.set()
        # NOTE: called before anything is aborted, so that the remains of an aborted step are not
        # taken for its result. The callback may wait for a lock whose holder waits for that step.
        callback = threading.Thread(
            target=self.on_failure, args=(reason,), name="tp-failure", daemon=True
        )
        callback.start()
        callback.join(_NOTICE_SECONDS)
        self._shut_down_channels()
        if hasattr(self, "group"):
            self.group.abort()

    def step_failed(self, error: Exception) -> None:
        """End the group after an error in a step. If a worker has ended, its end is the reason."""
        if not self._failed.wait(_NOTICE_SECONDS):
            # The workers compute a step in which rank 0 does not take part.
            self.fail(f"rank 0 could not launch a step: {error}")

    def close(self) -> None:
        """End the workers. No step may be launched and their pools may not be used any more."""
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
            self._ipc.close(address)
        self._mapped.clear()
        for worker in self._workers:
            worker.close()
        self._directory.cleanup()

    def _shut_down_channels(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.channel.socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """Fill the inboxes until every worker is gone."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._take(key.data):
                        selector.unregister(key.fileobj)

    def _take(self, worker: _Worker) -> bool:
        """Read one message; False after the last."""
        try:
            message = worker.channel.receive()
        except EOFError:
            self.fail(self._exit_reason(worker))
        else:
            if not isinstance(message, RankFailed):
                worker.inbox.put(message)
                return True
            self.fail(f"tensor-parallel rank {worker.rank} failed: {message.reason}")
        worker.inbox.put(None)
        return False

    def _exit_reason(self, worker: _Worker) -> str:
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = worker.process.wait(1.0)
        how = "closed its connection" if status is None else f"ended with status {status}"
        return f"tensor-parallel rank {worker.rank} (process {worker.process.pid}) {how}"


class LeadingRunner:
    """The :class:`pd.engine.model_runner.ModelRunner` of rank 0, whose steps all ranks compute."""

    def __init__(self, runner: ModelRunner, leader: Leader) -> None:
        self._runner, self._leader = runner, leader

    @property
    def eagle(self) -> EagleWriter | None:
        """See :class:`pd.engine.model_runner.ModelRunner`; on this rank alone."""
        return self._runner.eagle

    @property
    def graphs(self) -> DecodeGraphs | None:
        """See :class:`pd.engine.model_runner.ModelRunner`."""
        return self._runner.graphs

    @property
    def mixed_graphs(self) -> MixedGraphs | None:
        """See :class:`pd.engine.model_runner.ModelRunner`."""
        return self._runner.mixed_graphs

    @property
    def takes_unread(self) -> bool:
        """Other ranks do not have the outcome of a step before the host has read it."""
        return False

    def move_tokens(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """See :meth:`pd.engine.kv_pool.KVPool.move_tokens`; on all ranks.

        Raises:
            NodeFailedError: a worker is gone.
        """
        try:
            self._leader.move_tokens(source, to)
            self._runner.move_tokens(source, to)
        except Exception as error:  # after any error the ranks no longer do the same
            self._leader.step_failed(error)
            raise NodeFailedError(str(self._leader.failure)) from error

    def drop_graphs(self) -> None:
        """See :meth:`pd.engine.model_runner.ModelRunner.drop_graphs`; on this rank alone."""
        self._runner.drop_graphs()

    @torch.inference_mode()
    def forward(
        self,
        items: Sequence[ForwardItem],
        on_layers_done: Callable[[int, int], None] | None = None,
        previous_tokens: torch.Tensor | None = None,
        outcome: StepOutcome | None = None,
    ) -> torch.Tensor:
        """See :meth:`pd.engine.model_runner.ModelRunner.forward`; without ``outcome``.

        Raises:
            NodeFailedError: a worker is gone.
        """
        assert outcome is None
        try:
            self._leader.announce(items, previous_tokens)
            return self._runner.forward(items, on_layers_done, previous_tokens)
        except Exception as error:  # after any error the ranks no longer do the same
            self._leader.step_failed(error)
            raise NodeFailedError(str(self._leader.failure)) from error
