"""Configuration of a node, as the command line and YAML files give it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd.core.errors import UsageError
from pd.core.kv_events_config import NO_KV_EVENTS, KVEventsConfig

if TYPE_CHECKING:
    from pathlib import Path

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Choices of the flags, defined here because we reject a wrong one before we load anything.
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("auto", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
SCHEDULE_POLICIES = ("lpm", "fcfs", "lof", "dfs-weight", "priority", "random")
RADIX_CACHES = ("on", "off")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "slru", "priority")
ATTENTION_BACKENDS = ("auto", "torch", "triton", "flashinfer")
OVERLAP_SCHEDULES = ("auto", "on", "off")
GENERATION_CONFIGS = ("auto", "none")
SPECULATIVE_ADAPTIVE = ("on", "off")
SPECULATIVE_NGRAM_CACHES = ("on", "off")
GRAMMAR_BACKENDS = ("xgrammar", "none")
SPECULATIVE_ALGORITHMS = ("none", "ngram", "draft", "eagle", "mtp")
# Algorithms that read hidden states of the model. Every node needs them, prefill nodes too.
WITH_STATES = ("eagle", "mtp")
# Algorithms with a checkpoint of their own.
_WITH_MODEL = ("draft", "eagle")
ELASTIC = ("auto", "off")
ROUTING_POLICIES = ("cache_aware", "round_robin", "random", "power_of_two")
# Limit on the tokens of one event; less than a client may leave unread.
MAX_STREAM_INTERVAL = 512
# Length of a model's name in the API.
MAX_MODEL_CHARACTERS = 4096
# Formats in which models write tool calls and reasoning.
TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "gemma4",
    "glm45",
    "glm47",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    # Other servers' names of the same.
    "deepseekv3",
    "deepseekv31",
    "glm",
    "gpt-oss",
    "llama3",
    "llama4_pythonic",
    "qwen",
    "qwen25",
    "qwen3_xml",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "gemma4",
    "glm45",
    "kimi_k2",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
    # Other servers' names of the same.
    "deepseek-r1",
    "deepseek-v3",
    "glm47",
    "gpt-oss",
    "kimi",
)


# A step computes one more token than this for each sequence. A model hardly ever accepts more.
MAX_DRAFT_TOKENS = 64
MAX_TOPK = 16


@dataclass(frozen=True)
class NodeConfig:
    """Settings of one prefill, decode or unified node, with the names of the flags.

    The class is flat because flags and settings files are. The command line takes its defaults from
    here.

    Attributes:
        port: 0 picks a free port; the command line has its own defaults.
        message_endpoint: where proxies connect, such as ``ipc://PATH``. Without it, we bind a free
            TCP port of ``host``. It is no flag, because only our own processes choose it.
        bootstrap_port: 0 picks a free port. Proxies learn it from the node and tell its peers.
        quantization: auto keeps the weights as the checkpoint has them; fp8 quantizes them when we
            load them.
        kv_cache_dtype: auto keeps K and V in the dtype of the model.
        kv_cache_tokens: size of the KV cache; overrides ``mem_fraction``.
        drain_timeout: seconds for running requests after SIGTERM.
        retraction_host_memory, grammar_memory, grammar_cache: sizes in bytes.
        cuda_graph_batch_sizes: None lets us choose; we ignore a 0 among them.
        trust_network: only hosts of this deployment can reach the node's ports.
        elastic: with auto, the node can take every role, and starts with ``role``.
    """

    role: str
    model: Path
    served_model_name: str = ""
    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    message_endpoint: str = ""
    bootstrap_port: int = 0
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    quantization: str = "auto"
    seed: int = 0
    tp_size: int = 1
    ep_size: int = 1
    page_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    mem_fraction: float = 0.85
    context_length: int | None = None
    generation_config: str = "auto"
    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    schedule_policy: str = "lpm"
    max_overtakes: int = 64
    radix_cache: str = "on"
    eviction_policy: str = "lru"
    attention_backend: str = "auto"
    overlap_schedule: str = "auto"
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    speculative_algorithm: str = "none"
    speculative_draft_model: Path | None = None
    speculative_num_draft_tokens: int = 4
    speculative_topk: int = 1
    speculative_adaptive: str = "on"
    speculative_ngram_cache: str = "off"
    grammar_backend: str = "xgrammar"
    grammar_cpu_seconds: float = 10.0
    grammar_memory: int = 1 << 30
    grammar_cache: int = 256 << 20
    grammar_jump_forward: bool = False
    transfer_backend: str = "auto"
    trust_network: bool = False
    fake_script: Path | None = None
    kv_digest: bool = False
    cluster_key: bytes | None = field(default=None, repr=False)
    reserved_decode_tokens: int = 512
    retraction_host_memory: int = 4 << 30
    drain_timeout: float = 30.0
    elastic: str = "off"
    kv_events_config: KVEventsConfig = NO_KV_EVENTS

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise UsageError(f"--page-size must be one of {PAGE_SIZES}, not {self.page_size}")
        for name, low in (
            ("kv_cache_tokens", self.page_size),
            ("tp_size", 1),
            ("ep_size", 1),
            ("max_running_requests", 1),
            ("chunked_prefill_size", 1),
            ("max_overtakes", 0),
            ("reserved_decode_tokens", 0),
            ("speculative_num_draft_tokens", 1),
            ("speculative_topk", 1),
            ("retraction_host_memory", 0),
            ("grammar_cpu_seconds", 1),
            ("grammar_memory", 1 << 20),
            ("grammar_cache", 0),
            ("context_length", 1),
            ("drain_timeout", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least {low}, not {value}")
        has_model = self.speculative_draft_model is not None
        if (self.speculative_algorithm in _WITH_MODEL) != has_model:
            raise UsageError(
                "--speculative-draft-model and --speculative-algorithm draft or eagle need each "
                f"other, not {self.speculative_draft_model or 'no model'} with "
                f"{self.speculative_algorithm}"
            )
        if self.speculative_ngram_cache == "on" and self.speculative_algorithm != "ngram":
            raise UsageError(
                "--speculative-ngram-cache on needs --speculative-algorithm ngram, not "
                f"{self.speculative_algorithm}"
            )
        if self.speculative_num_draft_tokens > MAX_DRAFT_TOKENS:
            raise UsageError(
                f"--speculative-num-draft-tokens must be at most {MAX_DRAFT_TOKENS}, not "
                f"{self.speculative_num_draft_tokens}"
            )
        if self.speculative_topk > MAX_TOPK:
            raise UsageError(
                f"--speculative-topk must be at most {MAX_TOPK}, not {self.speculative_topk}"
            )
        if self.speculative_topk > 1 and self.speculative_algorithm not in WITH_STATES:
            raise UsageError(
                f"--speculative-topk {self.speculative_topk} (above 1) needs "
                f"--speculative-algorithm eagle or mtp, not {self.speculative_algorithm}"
            )
        if self.speculative_topk > 1 and self.speculative_num_draft_tokens == MAX_DRAFT_TOKENS:
            raise UsageError(
                f"--speculative-topk {self.speculative_topk} makes trees of at most "
                f"{MAX_DRAFT_TOKENS - 1} tokens (--speculative-num-draft-tokens)"
            )
        if not 0.0 < self.mem_fraction <= 1.0:
            raise UsageError(f"--mem-fraction must be in (0, 1], not {self.mem_fraction}")

    @property
    def is_elastic(self) -> bool:
        """Whether the node can take every role."""
        return self.elastic == "auto"

    @property
    def computes_prompts(self) -> bool:
        """Whether the node has a prefill scheduler."""
        return self.role != "decode" or self.is_elastic

    @property
    def decodes(self) -> bool:
        """Whether the node has a decode scheduler."""
        return self.role != "prefill" or self.is_elastic

    @property
    def hands_off(self) -> bool:
        """Whether KV travels between this node and others."""
        return self.role != "unified" or self.is_elastic

    @property
    def public_host(self) -> str:
        """The host for peers and proxies."""
        return self.advertise_host or self.host

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or self.model.resolve().name
