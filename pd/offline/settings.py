"""Arguments of the offline classes: vLLM's names, and those of our own settings."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

from pd.core import config as choices
from pd.core.config import NodeConfig
from pd.core.errors import UsageError
from pd.core.sampling_params import SEED_LIMIT
from pd.models.checkpoint import find_checkpoint
from pd.offline.sampling_params import refuse_arguments

# vLLM's names of our settings.
_NAMES = {
    "max_model_len": "context_length",
    "gpu_memory_utilization": "mem_fraction",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "block_size": "page_size",
}
# Settings of nodes that make no sense for one engine without a port.
_NOT_OFFLINE = {
    "role",
    "model",
    "host",
    "advertise_host",
    "port",
    "message_endpoint",
    "bootstrap_port",
    "tp_size",
    "ep_size",
    "transfer_backend",
    "trust_network",
    "fake_script",
    "kv_digest",
    "cluster_key",
    "drain_timeout",
    "elastic",
    "kv_events_config",
}
_NODE_SETTINGS = {field.name for field in dataclasses.fields(NodeConfig)} - _NOT_OFFLINE
# The settings that are numbers, each with its type.
_NUMBERS = {
    field.name: kind
    for field in dataclasses.fields(NodeConfig)
    if (kind := str(field.type).split(" | ")[0]) in ("int", "float")
}
_PROXY_SETTINGS = {"tokenizer", "tool_call_parser", "reasoning_parser", "split_special_tokens"}
_CHOICES = {
    "dtype": choices.DTYPES,
    "load_format": choices.LOAD_FORMATS,
    "quantization": choices.QUANTIZATIONS,
    "kv_cache_dtype": choices.KV_CACHE_DTYPES,
    "generation_config": choices.GENERATION_CONFIGS,
    "schedule_policy": choices.SCHEDULE_POLICIES,
    "radix_cache": choices.RADIX_CACHES,
    "eviction_policy": choices.EVICTION_POLICIES,
    "attention_backend": choices.ATTENTION_BACKENDS,
    "overlap_schedule": choices.OVERLAP_SCHEDULES,
    "speculative_algorithm": choices.SPECULATIVE_ALGORITHMS,
    "speculative_adaptive": choices.SPECULATIVE_ADAPTIVE,
    "speculative_ngram_cache": choices.SPECULATIVE_NGRAM_CACHES,
    "grammar_backend": choices.GRAMMAR_BACKENDS,
}
# Arguments of vLLM that change nothing here, with any value. We never run a checkpoint's code.
_WITHOUT_EFFECT = {
    "trust_remote_code",
    "disable_log_stats",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
}
# Unsupported arguments of vLLM, and the values with which they ask for nothing.
_UNSUPPORTED = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_lora": False,
    "cpu_offload_gb": 0,
    "tokenizer_mode": "auto",
    "config_format": "auto",
    "runner": "auto",
    "task": "generate",
    "skip_tokenizer_init": False,
    "hf_overrides": None,
}
_SPECULATIVE_METHODS = {
    "ngram": "ngram",
    "draft_model": "draft",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
}
_DTYPES = {"half": "float16", "float": "float32"}
_MODEL_NAMES = "the directory of a checkpoint, or its id in the Hugging Face cache"


class OfflineSettings(NamedTuple):
    """What a program asked for.

    Attributes:
        node: settings of the engine, without its address.
        proxy: fields of :class:`pd.proxy.config.ProxyConfig`.
        seed: seed of the requests without one; None draws one for each.
        cpu_threads: number of threads on a CPU; None takes one for each core.
        log_level: the engine logs from this level on.
    """

    node: NodeConfig
    proxy: dict[str, Any]
    seed: int | None
    cpu_threads: int | None
    log_level: str


def read_settings(owner: str, model: str | Path | None, given: dict[str, Any]) -> OfflineSettings:
    """Check the arguments of a class with an engine of its own, whose name is ``owner``.

    Raises UsageError, which names the argument.
    """
    if model is None:
        raise UsageError(f"{owner}: give a model ({_MODEL_NAMES})")
    arguments = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    cpu_threads = arguments.pop("cpu_threads", None)
    log_level = arguments.pop("log_level", "warning")
    if str(log_level).upper() not in logging.getLevelNamesMapping():
        raise UsageError(
            f"{owner}: log_level={log_level!r} is unknown; give warning, info or debug"
        )
    seed = arguments.pop("seed", None)
    if seed is not None:
        _check_number(owner, "seed", seed, "int")
    settings: dict[str, Any] = {"seed": 0 if seed is None else seed % SEED_LIMIT}
    settings |= _read_speculation(arguments.pop("speculative_config", None))
    if arguments.pop("enforce_eager", False):
        settings["cuda_graph_batch_sizes"] = (0,)
    if arguments.pop("enable_prefix_caching", True) is False:
        settings["radix_cache"] = "off"
    if arguments.get("generation_config") == "vllm":  # its own defaults
        arguments["generation_config"] = "none"
    proxy = {}
    for name in list(arguments):
        ours = _NAMES.get(name, name)
        if arguments[name] is None or ours not in _NODE_SETTINGS | _PROXY_SETTINGS:
            continue
        value = _convert_value(owner, ours, arguments.pop(name))
        if ours in _PROXY_SETTINGS:
            proxy[ours] = value
        elif ours in settings and ours != "seed":
            raise UsageError(f"{owner}: {name}={value!r} and another argument set {ours}; give one")
        else:
            settings[ours] = value
    refuse_arguments(owner, arguments, _UNSUPPORTED)
    directory = find_checkpoint(model)
    if not Path(model).expanduser().is_dir():
        settings.setdefault("served_model_name", str(model))
    return OfflineSettings(
        NodeConfig(role="unified", model=directory, **settings),
        proxy,
        seed,
        cpu_threads,
        log_level,
    )


def check_remote(owner: str, given: dict[str, Any]) -> None:
    """Check the arguments of a class for a running deployment. Raises UsageError for any that its
    nodes decide."""
    for name, value in given.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            raise UsageError(
                f"{owner}: {name}={value!r} cannot be set for a running deployment; leave it out, "
                "or set it where the nodes start"
            )


def _convert_value(owner: str, name: str, value: Any) -> Any:
    if name == "dtype":  # also of torch, which we do not import
        value = str(value).removeprefix("torch.")
        value = _DTYPES.get(value, value)
    elif name == "tokenizer":
        value = str(value)
    elif name == "speculative_draft_model":
        value = find_checkpoint(value)
    elif name == "cuda_graph_batch_sizes":
        value = tuple(value)
    if name in _NUMBERS:
        _check_number(owner, name, value, _NUMBERS[name])
    if name in _CHOICES and value not in _CHOICES[name]:
        raise UsageError(
            f"{owner}: {name}={value!r} is unknown; give one of {', '.join(_CHOICES[name])}"
        )
    return value


def _check_number(owner: str, name: str, value: object, kind: str) -> None:
    kinds = int if kind == "int" else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise UsageError(f"{owner}: {name}={value!r} is not a number; give {kind}")


def _read_speculation(given: dict[str, Any] | None) -> dict[str, Any]:
    """Read vLLM's ``speculative_config``."""
    if given is None:
        return {}
    arguments = dict(given)
    model = arguments.pop("model", None)
    method = arguments.pop("method", None) or (
        "ngram" if model in (None, "ngram") else "draft_model"
    )
    if method not in _SPECULATIVE_METHODS:
        raise UsageError(
            f"speculative_config: method={method!r} is not supported; give one of "
            f"{', '.join(_SPECULATIVE_METHODS)}"
        )
    settings: dict[str, Any] = {"speculative_algorithm": _SPECULATIVE_METHODS[method]}
    tokens = arguments.pop("num_speculative_tokens", None)
    if tokens is not None:
        settings["speculative_num_draft_tokens"] = tokens
    if method != "ngram" and model is not None:
        settings["speculative_draft_model"] = find_checkpoint(model)
    refuse_arguments("speculative_config", arguments, {"draft_tensor_parallel_size": 1})
    return settings
