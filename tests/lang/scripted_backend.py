"""A backend whose answers a test writes, and which records what it was asked."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from pd.lang.backend import ModelAnswer, TokenUsage
from pd.lang.choices import ChoicesDecision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd.lang.backend import ProgramPrompt
    from pd.lang.choices import AnyMethod
    from pd.lang.ir import GenSettings
    from pd.proxy.text.chat_template import ChatTemplate


class ScriptedBackend:
    """Answers a prompt by ``answer(text, settings)``, cut at the first stop string.

    Attributes:
        log: what was asked, in order: ``("gen", text)``, ``("select", text)``, ``("cache", text)``
            and ``("abort", rid)``.
    """

    def __init__(
        self,
        answer: Callable[[str, GenSettings], str] = lambda text, settings: "answer",
        *,
        is_chat_model: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        self.is_chat_model = is_chat_model
        self.token_usage = TokenUsage()
        self.log: list[tuple[str, str]] = []
        self.prompts: list[ProgramPrompt] = []
        self._answer = answer
        self._template = template
        self._lock = threading.Lock()

    def _note(self, kind: str, text: str) -> None:
        with self._lock:
            self.log.append((kind, text))

    def list_texts(self, kind: str) -> list[str]:
        return [text for each, text in self.log if each == kind]

    def get_model_name(self) -> str:
        return "scripted"

    def get_chat_template(self) -> ChatTemplate | None:
        return self._template

    def generate(self, prompt: ProgramPrompt, settings: GenSettings, rid: str) -> ModelAnswer:
        self._note("gen", prompt.text)
        self.prompts.append(prompt)
        text, is_whole = self._answer(prompt.text, settings), True
        for stop in settings.stops:
            head, found, _ = text.partition(stop)
            text, is_whole = head, is_whole and not found
        self.token_usage.add_call(len(prompt.text), len(text))
        return ModelAnswer((text,) * (settings.n or 1), {"rid": rid}, is_whole)

    def stream(
        self, prompt: ProgramPrompt, settings: GenSettings, rid: str
    ) -> Iterator[ModelAnswer]:
        (text,) = self.generate(prompt, settings, rid).texts
        for letter in text:
            yield ModelAnswer((letter,), {"rid": rid, "output_token_logprobs": [letter]})

    def select(
        self, prompt: ProgramPrompt, choices: Sequence[str], method: AnyMethod, rid: str
    ) -> ChoicesDecision:
        self._note("select", prompt.text)
        return ChoicesDecision(choices[len(prompt.text) % len(choices)], {})

    def cache_prefix(self, prompt: ProgramPrompt, rid: str) -> None:
        self._note("cache", prompt.text)

    def abort(self, rid: str) -> None:
        self._note("abort", rid)

    def flush_cache(self) -> None:
        self._note("flush", "")

    def get_server_info(self) -> dict[str, Any]:
        return {"model": "scripted"}
