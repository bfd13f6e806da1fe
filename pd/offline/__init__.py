"""Runs a model from a program, without a server: :class:`LLM` in vLLM's shape, and :class:`Engine`
for programs of :mod:`pd.lang`.

The engine is a unified node in a child process, which imports torch. The proxy's request and text
code runs here on a thread, so answers are those of a deployment. Neither opens a port.
"""

from pd.offline.engine import Engine
from pd.offline.llm import LLM
from pd.offline.outputs import CompletionOutput, Logprob, RequestOutput
from pd.offline.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
