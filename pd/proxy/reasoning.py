"""Text in which a model reasons before it answers: where it begins and ends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from pd.proxy.tools import tags
from pd.proxy.tools.events import Content, Reasoning
from pd.proxy.tools.reader import Reader

if TYPE_CHECKING:
    from pd.proxy.tools.incoming import Steps
    from pd.proxy.tools.tags import Format

_SPACE = re.compile(r"\s*")
# White space before reasoning that is held back.
MAX_SPACE = 64
# Where an answer begins: before its reasoning, if there will be any, inside it, or behind it.
Stage = Literal["before", "inside", "behind"]


class ReasoningTags(NamedTuple):
    """Tags around the reasoning of a family of models.

    Attributes:
        implied: an answer begins inside, even if the prompt does not end with the opening tag.
    """

    open: str
    close: str
    implied: bool = False

    def stage(self, tail: str, continued: str | None) -> Stage:
        """Return the stage in which an answer begins.

        Args:
            tail: the end of the prompt.
            continued: the message that the answer continues, if it does.
        """
        if continued:
            opened, closed = continued.rfind(self.open), continued.rfind(self.close)
            return "inside" if opened > closed else "behind"
        # What clients write is no part of it, since the template opens the turn behind that.
        tail = tail.rstrip()
        if tail.endswith(self.open):
            return "inside"
        if tail.endswith(self.close):
            return "behind"
        return "inside" if self.implied else "before"

    def then(self, stage: Stage, content: Format) -> Format:
        """The structural tag for reasoning that ``content`` follows."""
        if stage == "behind":
            return content
        begin = "" if stage == "inside" else self.open
        reasoning = tags.sequence(
            tags.tag(begin, tags.any_text(), self.close),
            {"type": "regex", "pattern": r"\n{0,2}"},
        )
        return tags.sequence(reasoning if stage == "inside" else tags.optional(reasoning), content)


_THINK = ReasoningTags("<think>", "</think>")
_MISTRAL = ReasoningTags("[THINK]", "[/THINK]")
_SEED = ReasoningTags("<seed:think>", "</seed:think>")
_FAMILIES = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK._replace(implied=True),
    "mistral": _MISTRAL,
    "seed_oss": _SEED,
}


def reasoning_tags(name: str, template: str) -> ReasoningTags | None:
    """Tags by the name of their family (of ``--reasoning-parser``), or for ``auto`` those that a
    chat template knows; None if it knows none."""
    if name != "auto":
        return _FAMILIES.get(name)
    known = (_SEED, _MISTRAL, _THINK)
    return next((each for each in known if each.open in template or each.close in template), None)


class ReasoningParser(Reader):
    """Tells reasoning from content. White space around reasoning is left out, but at its end."""

    def __init__(self, tags: ReasoningTags, stage: Stage, *, verbatim: bool) -> None:
        """``verbatim``: tags and white space around them are a part of the reasoning."""
        super().__init__()
        self._tags = tags
        self._inside = stage == "inside"
        self._verbatim = verbatim

    def read(self) -> Steps[None]:
        source, tags = self.source, self._tags
        inside = self._inside
        if not inside:
            begin = yield from self._opening()
            inside = begin.endswith(tags.open)
            if not inside:
                self._content(begin)
            elif self._verbatim:
                self._reasoning(begin)
        if inside:
            if not self._verbatim:
                yield from source.skip_space()
            close = yield from source.pass_until((tags.close,), self._reasoning)
            if self._verbatim:
                self._reasoning(close)
            else:
                yield from source.skip_space()
        yield from source.pass_rest(self._content)

    def _opening(self) -> Steps[str]:
        """White space and the opening tag, as much as there is of them."""
        source = self.source
        space = yield from source.while_in(_SPACE, MAX_SPACE)
        return space + (yield from source.one_of((self._tags.open,)))

    def _reasoning(self, text: str) -> None:
        if text:
            self.events.append(Reasoning(text))

    def _content(self, text: str) -> None:
        if text:
            self.events.append(Content(text))
