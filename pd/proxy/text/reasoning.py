"""Separates a model's reasoning from its answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from pd.proxy.text.tools import gemma, harmony, kimi, tags
from pd.proxy.text.tools.events import Content, Reasoning
from pd.proxy.text.tools.reader import Reader

if TYPE_CHECKING:
    from pd.proxy.text.tools.events import OutputParser
    from pd.proxy.text.tools.incoming import Steps
    from pd.proxy.text.tools.tags import Format

_SPACE = re.compile(r"\s*")
# Limit on the white space before reasoning, because we hold it back.
MAX_SPACE = 64
# Where an answer begins: before any reasoning, inside it, or after it.
Stage = Literal["before", "inside", "after"]


class ReasoningTags(NamedTuple):
    """Tags around the reasoning of a family of models.

    Attributes:
        implied: answers begin inside the reasoning even without an opening tag in the prompt.
        interrupts: tags that begin calls, so they end the reasoning, too.
        open_token: special token at the beginning of ``open``, if that has other text, too.
        in_channels: an answer consists of messages, of which several may be reasoning
            (:mod:`pd.proxy.text.tools.harmony`).
    """

    open: str
    close: str
    implied: bool = False
    interrupts: tuple[str, ...] = ()
    in_channels: bool = False
    open_token: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Tags that may be special tokens."""
        return (self.open_token or self.open, *self.ends)

    @property
    def ends(self) -> tuple[str, ...]:
        """Tags that end the reasoning."""
        return (self.close, *self.interrupts)

    def is_used_in(self, template: str) -> bool:
        """Tell whether a chat template has these tags."""
        if self.in_channels:
            return self.open in template
        return (self.open in template or self.close in template) and all(
            tag in template for tag in self.interrupts
        )

    def begin_answer(self, content: Format) -> Format:
        """Put the text that a model writes before its answer before the format of the answer."""
        if not self.in_channels:
            return content
        return tags.make_sequence(tags.make_text(harmony.FINAL), content)

    def find_stage(self, tail: str, continued: str | None) -> Stage:
        """Find out where an answer begins.

        Args:
            tail: end of the prompt.
            continued: the message to continue, if any.
        """
        if continued:
            opened, closed = continued.rfind(self.open), continued.rfind(self.close)
            return "inside" if opened > closed else "after"
        # A client cannot write these tags here, because the template opens the assistant's turn
        # last.
        tail = tail.rstrip()
        if tail.endswith(self.open):
            return "inside"
        if tail.endswith(self.close):
            return "after"
        return "inside" if self.implied else "before"

    def prepend_reasoning(self, stage: Stage, content: Format) -> Format:
        """Make the structural tag for reasoning with ``content`` after it."""
        if stage == "after":
            return content
        if self.in_channels:
            return harmony.prepend_analysis(content)
        begin = "" if stage == "inside" else self.open
        reasoning = tags.make_sequence(
            tags.make_tag(begin, tags.any_text(*self.interrupts), self.close),
            {"type": "regex", "pattern": r"\n{0,2}"},
        )
        return tags.make_sequence(
            reasoning if stage == "inside" else tags.make_optional(reasoning), content
        )


_THINK = ReasoningTags("<think>", "</think>")
_MISTRAL = ReasoningTags("[THINK]", "[/THINK]")
_SEED = ReasoningTags("<seed:think>", "</seed:think>")
_KIMI = _THINK._replace(interrupts=(kimi.SECTION,))
_DEEPSEEK_R1 = _THINK._replace(implied=True)
_GEMMA4 = ReasoningTags(
    "<|channel>thought",
    "<channel|>",
    interrupts=(gemma.Gemma4Parser.opening,),
    open_token="<|channel>",
)
_HARMONY = ReasoningTags(harmony.ANALYSIS, harmony.END, in_channels=True)
# By the names in all servers.
_FAMILIES = {
    "qwen3": _THINK,
    "deepseek_r1": _DEEPSEEK_R1,
    "deepseek-r1": _DEEPSEEK_R1,
    "deepseek_v3": _THINK,
    "deepseek-v3": _THINK,
    "gemma4": _GEMMA4,
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi": _KIMI,
    "kimi_k2": _KIMI,
    "mistral": _MISTRAL,
    "seed_oss": _SEED,
    "gpt-oss": _HARMONY,
    "openai_gptoss": _HARMONY,
}


def find_reasoning_tags(name: str, template: str) -> ReasoningTags | None:
    """Find the tags of a family (``--reasoning-parser``).

    For ``auto``, find those in the chat template. Return None if there are none.
    """
    if name != "auto":
        return _FAMILIES.get(name)
    known = (_HARMONY, _GEMMA4, _SEED, _MISTRAL, _KIMI, _THINK)
    return next((each for each in known if each.is_used_in(template)), None)


def make_reasoning_parser(tags: ReasoningTags, stage: Stage, *, verbatim: bool) -> OutputParser:
    """Make the parser of an answer without calls.

    ``verbatim``: the reasoning includes the tags and the white space around them.
    """
    if tags.in_channels:
        return harmony.HarmonyParser(None, begins_message=stage == "before")
    return ReasoningParser(tags, stage, verbatim=verbatim)


class ReasoningParser(Reader):
    """Separates reasoning from content. It drops white space around the reasoning, but not at its
    end.
    """

    def __init__(self, tags: ReasoningTags, stage: Stage, *, verbatim: bool) -> None:
        """``verbatim``: the reasoning includes the tags and the white space around them."""
        super().__init__()
        self._tags = tags
        self._inside = stage == "inside"
        self._verbatim = verbatim

    def read_text(self) -> Steps[None]:
        source, tags = self.source, self._tags
        inside = self._inside
        if not inside:
            begin = yield from self._read_opening()
            inside = begin.endswith(tags.open)
            if not inside:
                self._emit_content(begin)
            elif self._verbatim:
                self._emit_reasoning(begin)
        if inside:
            if not self._verbatim:
                yield from source.skip_space()
            end = yield from source.pass_until(tags.ends, self._emit_reasoning)
            if end in tags.interrupts:
                self._emit_content(end)
            elif self._verbatim:
                self._emit_reasoning(end)
            else:
                yield from source.skip_space()
        yield from source.pass_rest(self._emit_content)

    def _read_opening(self) -> Steps[str]:
        """Read white space and the opening tag, as far as they are there."""
        source = self.source
        space = yield from source.read_while(_SPACE, MAX_SPACE)
        return space + (yield from source.read_one_of((self._tags.open,)))

    def _emit_reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def _emit_content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))
