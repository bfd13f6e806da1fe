"""A language for programs with many calls of a model. Import it as ``import pd.lang as pl``.

See docs/language.md. The names are those of SGLang's frontend.
"""

from pd.core.errors import ProgramError, TracingError
from pd.lang.api import (
    Runtime,
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    trace,
    user,
    user_begin,
    user_end,
    video,
)
from pd.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from pd.lang.endpoint import RuntimeEndpoint
from pd.lang.openai_backend import OpenAI
from pd.lang.settings import global_config

__all__ = [
    "OpenAI",
    "ProgramError",
    "Runtime",
    "RuntimeEndpoint",
    "TracingError",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "trace",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
