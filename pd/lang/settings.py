"""Settings of the language for the whole process, and of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd.lang.backend import resolve_backend
from pd.lang.ir import make_settings
from pd.lang.run import running_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd.lang.backend import Backend
    from pd.lang.ir import GenSettings

# Sampling of a run. It holds for all generations without settings of their own.
RUN_SETTINGS: dict[str, Any] = {
    "max_new_tokens": 128,
    "n": None,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "temperature": 1.0,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "ignore_eos": None,
    "return_logprob": None,
    "logprob_start_len": None,
    "top_logprobs_num": None,
    "return_text_in_logprobs": None,
}


@dataclass
class GlobalConfig:
    """Settings for all programs of the process.

    Attributes:
        verbosity: 2 prints the text of every run.
        default_backend: the model of programs that name none.
        enable_precache_with_tracing: batches send the common text of their prompts first. To find
            it, we run the body once more, on abstract values, up to its first generation.
        prefix_lease: seconds, up to 60, for which the server should keep the prefix of forks and
            batches in its cache; 0 leaves it to the cache's own policy.
    """

    verbosity: int = 0
    default_backend: object = None
    enable_precache_with_tracing: bool = True
    prefix_lease: float = 0.0


global_config = GlobalConfig()


def choose_backend(backend: object) -> Backend:
    """Choose the given backend, or that of the running program, or the default one.

    Raises UsageError if there is none.
    """
    run = running_run.get()
    if backend is None and run is not None:
        return run.backend
    return resolve_backend(backend or global_config.default_backend)


def split_settings(kwargs: Mapping[str, Any]) -> tuple[GenSettings, dict[str, Any]]:
    """Split the keywords of a run into its sampling and the arguments of the body."""
    given = {name: kwargs.get(name, default) for name, default in RUN_SETTINGS.items()}
    arguments = {name: value for name, value in kwargs.items() if name not in RUN_SETTINGS}
    return make_settings(**given), arguments
