"""pd: prefill/decode disaggregated LLM serving."""

from importlib import import_module

__version__ = "0.2.0"

# Names of :mod:`pd.offline`, which we import when they are used. The type stub declares them.
_OFFLINE = (
    "LLM",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
)


def __getattr__(name: str) -> object:
    if name in _OFFLINE:
        return getattr(import_module("pd.offline"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
