"""The interface between the language and a model.

The interpreter talks to a :class:`Backend`. Two kinds exist: :class:`pd.lang.native.NativeBackend`
for everything that answers pd's native requests, and :class:`pd.lang.openai_backend.OpenAI`.

To run programs on another engine, implement :class:`NativeService` and pass an object whose
attribute ``endpoint`` is ``NativeBackend(service)``. :func:`resolve_backend` looks there first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pd.lang.choices import AnyMethod, ChoicesDecision
    from pd.lang.ir import GenSettings
    from pd.proxy.text.chat_template import ChatTemplate


@dataclass(frozen=True)
class ProgramPrompt:
    """Everything a state has said so far.

    Attributes:
        text: for models of completions.
        messages: the closed turns, for models of chats.
        is_rendered: the text begins with a chat template, so the tokenizer must not put its own
            special tokens before it.
        is_assistant_turn: the assistant's turn is open and empty, so a chat model may answer.
    """

    text: str
    messages: tuple[dict[str, str], ...] = ()
    is_rendered: bool = False
    is_assistant_turn: bool = False


@dataclass(frozen=True)
class ModelAnswer:
    """An answer, or in a stream the next piece of one.

    Attributes:
        texts: one text for each of ``n`` answers.
        meta: facts about the answer, or a list of them with ``n`` above 1, as in ``meta_info`` of
            ``POST /generate``.
        is_whole: the model ended the answer by itself, instead of a stop string or a limit.
    """

    texts: tuple[str, ...]
    meta: Any
    is_whole: bool = False


@dataclass
class TokenUsage:
    """Counts the requests and tokens of a backend. All threads may call it."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_call(self, prompt_tokens: int, completion_tokens: int) -> None:
        with self._lock:
            self.calls += 1
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += completion_tokens

    def reset(self) -> None:
        with self._lock:
            self.calls = self.prompt_tokens = self.completion_tokens = 0


class Backend(Protocol):
    """A model that answers prompts. Many threads call its methods at the same time.

    Errors of the model or its server are PDErrors. ``rid`` names a request for :meth:`abort`, so no
    two requests under way have the same.

    Attributes:
        is_chat_model: it takes messages instead of texts, and cannot continue a turn.
        token_usage: its requests and tokens so far.
    """

    is_chat_model: bool
    token_usage: TokenUsage

    def get_model_name(self) -> str:
        """Return the model's name or directory."""

    def get_chat_template(self) -> ChatTemplate | None:
        """Return the model's chat template. Without any, turns are rendered plainly."""

    def generate(self, prompt: ProgramPrompt, settings: GenSettings, rid: str) -> ModelAnswer:
        """Generate whole answers."""

    def stream(
        self, prompt: ProgramPrompt, settings: GenSettings, rid: str
    ) -> Iterator[ModelAnswer]:
        """Generate an answer in pieces. Closing the iterator aborts the request."""

    def select(
        self,
        prompt: ProgramPrompt,
        choices: Sequence[str],
        method: AnyMethod,
        rid: str,
    ) -> ChoicesDecision:
        """Pick the likeliest choice after the prompt."""

    def cache_prefix(self, prompt: ProgramPrompt, rid: str) -> None:
        """Compute the common beginning of later prompts. Without a prefix cache, do nothing."""

    def abort(self, rid: str) -> None:
        """End a request early: its call returns or raises soon. Unknown names are ignored."""

    def flush_cache(self) -> None:
        """Empty the prefix cache."""

    def get_server_info(self) -> dict[str, Any]:
        """Return facts about the server."""


class NativeService(Protocol):
    """Answers pd's native requests, as ``POST /generate`` and its neighbours do.

    A proxy does so over HTTP, and an engine in this process. Many threads call the methods at the
    same time. They raise PDErrors for everything that HTTP answers with another status than 200.
    """

    def generate(self, body: Mapping[str, Any]) -> Any:
        """Answer a body of ``POST /generate``: an object, or a list for a batch or ``n`` above 1.

        A request that :meth:`abort` ends returns with ``finish_reason`` ``abort``.
        """

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Answer a body with ``stream`` set by its events. Closing the iterator aborts it."""

    def abort(self, rid: str) -> None:
        """End the request with this ``rid``. Unknown names are ignored."""

    def flush_cache(self) -> None:
        """Answer ``POST /flush_cache``."""

    def describe_model(self) -> dict[str, Any]:
        """Answer ``GET /get_model_info``."""

    def describe_tokenizer(self) -> dict[str, Any]:
        """Answer ``GET /tokenizer_info``."""

    def describe_server(self) -> dict[str, Any]:
        """Answer ``GET /server_info``."""


def resolve_backend(backend: object) -> Backend:
    """Return the backend of an object, which is it or has it as ``endpoint``.

    Raises UsageError without a backend.
    """
    if backend is None:
        raise UsageError(
            "no backend: pass backend=… to run, or call set_default_backend(RuntimeEndpoint(URL))"
        )
    return cast("Backend", getattr(backend, "endpoint", backend))
