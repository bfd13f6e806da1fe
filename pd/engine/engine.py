"""A model on a device with its KV pool. Every node computes with one."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch

from pd.core.errors import PDError, SetupError, UsageError
from pd.core.node_info import KVLayout
from pd.engine.chunk_graphs import ChunkGraphs
from pd.engine.cuda_graphs import GraphRecorder
from pd.engine.eagle import EagleWriter, load_head, make_head_plane, read_head_config
from pd.engine.footprint import NO_EXTRA_MEMORY, log_memory_use, measure_footprint
from pd.engine.identity import build_identity, digest_identity
from pd.engine.kv_pool import DTYPES, KVPool
from pd.engine.model_runner import ModelRunner
from pd.engine.sampler import Sampler
from pd.engine.saved_pages import SavedPages
from pd.engine.step_graphs import capture_steps, choose_decode_sizes
from pd.engine.tensor_parallel.leader import Leader, LeadingRunner
from pd.kernels.attention import find_attention_backend
from pd.kernels.fp8 import has_fp8
from pd.models.config_reader import read_model_config
from pd.models.kv_scales import read_kv_scales
from pd.models.loader import load_model
from pd.models.quantization_reader import quantize_at_load
from pd.models.tensor_parallel import SINGLE, TensorParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from pd.core.config import NodeConfig
    from pd.core.node_info import DType, Plane
    from pd.engine.footprint import ExtraMemory, Footprint
    from pd.models.causal_lm import CausalLM
    from pd.models.config import ModelConfig

    IntArray = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

# On a CPU the pool shares memory with everything else on the host, so we limit it.
_CPU_POOL_LIMIT = 4 << 30


@dataclass(frozen=True)
class Engine:
    """Model, KV pool and sampler of a node, built from its configuration.

    Attributes:
        model_config: configuration of the whole model.
        identity: settings that determine the answers, see :mod:`pd.engine.identity`.
        layout: layout of the KV of all ranks; ``pool.layout`` is one rank's part.
        leader: starts and drives the processes of the other ranks; None without them.
    """

    model_config: ModelConfig
    identity: dict[str, str]
    context_length: int
    attention_backend: str
    layout: KVLayout
    pool: KVPool
    runner: ModelRunner | LeadingRunner
    sampler: Sampler
    leader: Leader | None = None

    @property
    def model_id(self) -> str:
        """Digest of the identity."""
        return digest_identity(self.identity)

    @property
    def drafter_state_bytes(self) -> int:
        """Bytes that a hand-off must carry for the drafter in addition to KV; 0 for most
        drafters."""
        return 0 if self.runner.eagle is None else self.runner.eagle.state_bytes

    def set_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Set a callback for the end of another rank's process, after which nothing can be
        computed. It gets the reason and may run in any thread."""
        if self.leader is not None:
            self.leader.on_failure = callback

    def save_pages(self, pages: IntArray) -> SavedPages:
        """Copy pages (int32 ``[n]`` or ``[tables, n]``) to host memory. Each rank copies its part.
        Waits for the GPU."""
        return SavedPages(self.pool, pages, self.leader)

    def close(self) -> None:
        """End the processes of the other ranks. You may not launch anything afterwards."""
        self.sampler.rule_lanes.close()
        if self.leader is not None:
            # NCCL cannot be shut down while a graph holds captured work of it.
            self.runner.drop_graphs()
            self.leader.close()

    def plans_ahead(self, setting: str) -> bool:
        """Whether steps are planned ahead under ``--overlap-schedule``. By default only GPUs do so:
        a CPU computes a step before its launch returns, so planning ahead would only delay
        tokens."""
        return setting == "on" or (setting == "auto" and self.pool.memory.is_cuda)

    def activate_device(self) -> None:
        """Make the engine's GPU the current one of the calling thread, because some libraries
        launch on the current GPU. Every thread that launches steps calls this first."""
        if self.pool.memory.is_cuda:
            torch.cuda.set_device(self.pool.device)

    def use_side_stream(self) -> AbstractContextManager[object]:
        """Return a context that queues the calling thread's GPU work on a separate stream, so it
        does not wait for launched steps. Inside it, read only KV that the host knows to be
        complete."""
        if not self.pool.memory.is_cuda:
            return nullcontext()
        return torch.cuda.stream(self._side_stream)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.pool.device)

    def synchronize(self) -> None:
        """Wait until no launched work touches the pool any more."""
        if self.pool.memory.is_cuda:
            torch.cuda.synchronize(self.pool.device)

    @classmethod
    def build(
        cls,
        config: NodeConfig,
        extra_memory: ExtraMemory = NO_EXTRA_MEMORY,
        extra_planes: Sequence[Plane] = (),
    ) -> Engine:
        """Load the model and allocate the pool, with one process for each rank of ``--tp-size``.

        Args:
            extra_memory: memory to leave free on the device of the first rank.
            extra_planes: planes of the pool in addition to the model's K and V. They come first.

        Raises:
            UsageError: a setting cannot work, or the model is not supported.
            SetupError: the device does not exist, memory is short, or another rank failed.
        """
        if config.tp_size == 1:
            return cls.build_rank(config, extra_memory=extra_memory, extra_planes=extra_planes)
        read_model_config(config.model).split_by_ranks(config.tp_size, config.ep_size)
        leader = Leader(config, find_rank_device(config, 0), extra_planes)
        try:
            engine = cls.build_rank(
                config,
                leader.group,
                leader.agree_on_pages,
                extra_memory=extra_memory,
                extra_planes=extra_planes,
            )
            built = leader.wait_until_built()
            if config.hands_off:
                addresses = leader.map_pools(built, engine.pool.common_memory)
                engine.pool.set_parts(addresses, engine.layout)
        except BaseException as error:
            leader.close()
            if leader.failure is None or isinstance(error, PDError):
                raise
            raise SetupError(leader.failure) from error
        assert isinstance(engine.runner, ModelRunner)
        return replace(engine, runner=LeadingRunner(engine.runner, leader), leader=leader)

    @classmethod
    def build_rank(
        cls,
        config: NodeConfig,
        tp: TensorParallel = SINGLE,
        agree_on_pages: Callable[[int], int] = lambda num_pages: num_pages,
        shared_memory: int | None = None,
        extra_memory: ExtraMemory = NO_EXTRA_MEMORY,
        extra_planes: Sequence[Plane] = (),
    ) -> Engine:
        """Build one rank's part of the engine. All ranks call this at the same time.

        Args:
            agree_on_pages: gets the number of pages for which this rank has memory; returns the
                smallest number of all ranks.
            shared_memory: descriptor of the pool's memory, on a CPU (see :class:`KVPool`).
            extra_memory: memory to leave free on this rank's device.
        """
        try:
            return cls._build_rank(
                config, tp, agree_on_pages, shared_memory, extra_memory, extra_planes
            )
        except torch.OutOfMemoryError as error:
            device = find_rank_device(config, tp.rank)
            free, total = torch.cuda.mem_get_info(device)
            raise SetupError(
                f"{config.model_name} does not fit into {device}, of whose {total / 2**30:.1f} GiB "
                f"{free / 2**30:.1f} are free now: free some, lower --kv-cache-tokens or "
                "--mem-fraction if they are given, or use more GPUs (--tp-size)"
            ) from error
        except RuntimeError as error:
            # torch has no exception type for a failed allocation on a CPU.
            if "can't allocate memory" not in str(error):
                raise
            raise SetupError(
                f"{config.model_name} does not fit into the memory that this machine has free: "
                "free some, or lower --kv-cache-tokens if it is given"
            ) from error

    @classmethod
    def _build_rank(
        cls,
        config: NodeConfig,
        tp: TensorParallel,
        agree_on_pages: Callable[[int], int],
        shared_memory: int | None,
        extra_memory: ExtraMemory,
        extra_planes: Sequence[Plane],
    ) -> Engine:
        model_config = quantize_at_load(read_model_config(config.model), config.quantization)
        for problem in model_config.eos_problems if tp.rank == 0 else ():
            logger.warning("%s: %s", config.model_name, problem)
        device = find_rank_device(config, tp.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtype = choose_kv_dtype(config.dtype, model_config.dtype, device)
        context_length = find_context_length(config, model_config)
        # Look for the backend first, because loading the model may take minutes.
        attention = find_attention_backend(
            config.attention_backend,
            device,
            DTYPES[dtype],
            model_config.head_dim,
            latent=model_config.latent is not None,
            windows=model_config.needs_windows,
            fp8=config.kv_cache_dtype != "auto",
        )
        head_shape = read_head_config(config, model_config)
        planes = [] if head_shape is None else [make_head_plane(head_shape, dtype)]
        scales = _choose_kv_scales(config, model_config, device)
        all_planes = (*model_config.make_planes(dtype, scales), *extra_planes, *planes)
        layout = KVLayout(all_planes, config.page_size, tp.size)
        part = layout.of_rank(tp.rank)
        model = _load(config, model_config, DTYPES[dtype], device, tp)
        head = load_head(config, model, model_config)
        sizes = choose_graph_sizes(config, device)
        needs = measure_footprint(model, part, attention, config, sizes, context_length, head)
        page_bytes = KVPool.count_page_bytes(part) + extra_memory.page_bytes
        needs = needs._replace(lasting_bytes=needs.lasting_bytes + extra_memory.lasting_bytes)
        tables = layout.num_tables
        num_pages = agree_on_pages(_choose_num_pages(config, page_bytes, device, needs, tables))
        pool = KVPool(part, num_pages, device, shared_memory)
        runner = ModelRunner.build(
            model,
            pool,
            attention,
            prompts=config.computes_prompts,
            eagle=None if head is None else EagleWriter.build_for_pool(head, model, pool, config),
        )
        graphs = 0
        if device.type == "cuda":
            graphs = _capture_graphs(runner, config, sizes, context_length, progress=tp.rank == 0)
        logger.info(
            "%s: %s on %s with %s attention, KV cache of %d tokens in %s (%d pages of %d)",
            *(config.model_name, dtype, device, attention.name, num_pages * config.page_size),
            *(layout.model.stored_dtype, num_pages, config.page_size),
        )
        captured = {
            what: found.sizes
            for what, found in (
                ("batch", runner.graphs),
                ("chunk", runner.chunk_graphs),
                ("mixed step", runner.mixed_graphs),
            )
            if found is not None
        }
        log_memory_use(model, pool, needs.step_bytes, graphs, captured)
        return cls(
            model_config=model_config,
            identity=build_identity(config, model_config) if tp.rank == 0 else {},
            context_length=context_length,
            attention_backend=attention.name,
            layout=layout,
            pool=pool,
            runner=runner,
            sampler=Sampler(model_config.vocab_size, device),
        )


def find_rank_device(config: NodeConfig, rank: int) -> torch.device:
    """Return the device of a rank. Ranks use consecutive GPUs, and rank 0 uses ``--device``.

    Raises:
        UsageError: no such kind of device exists.
        SetupError: there are not enough GPUs.
    """
    device = _parse_device(config.device)
    if config.tp_size == 1 or device.type == "cpu":
        return device
    first, count = device.index or 0, torch.cuda.device_count()
    if first + config.tp_size > count:
        raise SetupError(
            f"--tp-size {config.tp_size} needs GPUs {first} to {first + config.tp_size - 1}; this "
            f"machine has {count} usable GPUs"
        )
    return torch.device("cuda", first + rank)


def _parse_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not name.startswith("cuda"):
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, not {name}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, not {name}") from error
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise SetupError(f"--device {name}: this machine has {count} usable GPUs; use --device cpu")
    return torch.device("cuda", index)


def choose_kv_dtype(name: str, checkpoint: str | None, device: torch.device) -> DType:
    """Return the dtype of the KV and the weights; ``auto`` follows the checkpoint on GPUs."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint or "bfloat16"
    if name not in DTYPES:
        raise UsageError(f"--dtype must be auto or one of {', '.join(DTYPES)}, not {name}")
    return cast("DType", name)


def _choose_kv_scales(
    config: NodeConfig, model_config: ModelConfig, device: torch.device
) -> tuple[float, ...] | None:
    """Return the scales of K and V in fp8; None to keep them in the model's dtype.

    Raises:
        UsageError: the checkpoint's scales are unusable, or the device has no fp8.
    """
    if config.kv_cache_dtype == "auto":
        return None
    if not has_fp8(device):
        raise UsageError(
            f"--kv-cache-dtype {config.kv_cache_dtype} needs a GPU with fp8 (compute capability "
            f"8.9 or later), not {torch.cuda.get_device_name(device)}"
        )
    return read_kv_scales(config.model, model_config, config.load_format)


def _load(
    config: NodeConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tp: TensorParallel,
) -> CausalLM:
    return load_model(
        config.model,
        model_config,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=tp.rank == 0,
        tp=tp,
        ep_size=config.ep_size,
    )


def find_context_length(config: NodeConfig, model_config: ModelConfig) -> int:
    """Return the maximum number of tokens of a sequence on this node.

    Args:
        model_config: configuration of the node's model.

    Raises:
        UsageError: ``--context-length`` exceeds the model's limit.
    """
    length = config.context_length or model_config.context_length
    if length > model_config.context_length:
        raise UsageError(
            f"--context-length {length} exceeds the model's {model_config.context_length}"
        )
    return length


def _capture_graphs(
    runner: ModelRunner,
    config: NodeConfig,
    sizes: tuple[int, ...],
    context_length: int,
    *,
    progress: bool,
) -> int:
    """Capture the CUDA graphs for the node's role. Returns the bytes that they reserved."""
    device = runner.pool.device
    recorder = GraphRecorder(device)
    reserved = torch.cuda.memory_reserved(device)
    if sizes:
        runner.graphs, runner.verify_graphs, runner.mixed_graphs = capture_steps(
            runner, recorder, config, sizes, context_length, progress=progress
        )
    if config.computes_prompts and (sizes or not config.decodes):
        runner.chunk_graphs = ChunkGraphs(runner, recorder, max_context=context_length)
    return torch.cuda.memory_reserved(device) - reserved


def choose_graph_sizes(config: NodeConfig, device: torch.device) -> tuple[int, ...]:
    """Return the batch sizes to capture as CUDA graphs; none on a CPU or on a node that does not
    decode."""
    if device.type != "cuda" or not config.decodes:
        return ()
    sizes = config.cuda_graph_batch_sizes
    if sizes is None:
        return choose_decode_sizes(config.max_running_requests)
    return tuple(size for size in sizes if size > 0)


def _choose_num_pages(
    config: NodeConfig, page_bytes: int, device: torch.device, needs: Footprint, tables: int
) -> int:
    """Choose the number of pages. As many as ``tables`` hold one page of tokens."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = (
            free
            - needs.lasting_bytes
            - max(int(total * (1 - config.mem_fraction)), needs.step_bytes)
        )
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // config.tp_size
        usable = int(free * config.mem_fraction)
    if config.kv_cache_tokens is not None:
        wanted = config.kv_cache_tokens // config.page_size * tables
        # NOTE: we do not subtract other needs, because they cannot be measured while another node
        # starts on the same GPU.
        if wanted * page_bytes > free:
            raise SetupError(
                f"--kv-cache-tokens {config.kv_cache_tokens} needs "
                f"{wanted * page_bytes / 2**30:.2f} GiB; {free / 2**30:.2f} GiB are free"
            )
        return wanted
    if device.type == "cpu":
        usable = min(usable, _CPU_POOL_LIMIT)
    if usable < page_bytes:
        raise SetupError(
            f"no memory is left for the KV cache ({free / 2**30:.2f} GiB free, a step takes "
            f"{needs.step_bytes / 2**30:.2f}, --mem-fraction {config.mem_fraction}); free some, "
            "raise --mem-fraction or lower --chunked-prefill-size"
        )
    return usable // page_bytes
