"""gpt-oss: messages in channels, in the format named harmony.

::

    <|channel|>analysis<|message|>I look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json
    <|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>It is sunny.<|return|>

There are no line breaks between the tags. The prompt ends with ``<|start|>assistant``. The
recipient may also come before the channel. Generation ends at ``<|call|>`` and ``<|return|>``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.text.tools.events import Content, Reasoning
from pd.proxy.text.tools.incoming import MalformedError
from pd.proxy.text.tools.json_text import pass_call
from pd.proxy.text.tools.reader import CallOptions, CallParser
from pd.proxy.text.tools.tags import (
    any_text,
    make_choice,
    make_optional,
    make_sequence,
    make_tag,
    make_text,
)

if TYPE_CHECKING:
    from pd.proxy.text.tools.incoming import Steps
    from pd.proxy.text.tools.tags import Format

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
NEXT = f"{START}assistant"
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
NAMESPACE = "functions."
RECIPIENT = " to="
_ENDS = (END, CALL, RETURN)
# Between messages, the end of the one before may come again.
_MARKS = (START, CHANNEL, *_ENDS)
_HEADER = re.compile(
    r"(?:assistant)?(?: to=(?P<first>[^\s<]+))?\s*"
    r"(?:<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<second>[^\s<]+))?\s*"
    r"(?:<\|constrain\|>)?\s*[\w.+/-]*)?\s*"
)
# A header that the end of the answer cuts off.
_CUT_HEADER = re.compile(
    r"(?:assistant)?(?:(?:<\|channel\|>| to=)[\w .:=/<|>+-]{0,200}| (?:to?)?|<[|chanel]*)?|"
    + "|".join("assistant"[:end] for end in range(1, 9))
)
# Recipients that are not functions of the request.
_OTHERS = ("assistant", "browser", "container", "python", "user")


class _Header(NamedTuple):
    """What a message is.

    Attributes:
        function: name of the called function; empty if the message is a text.
    """

    is_reasoning: bool
    function: str

    @classmethod
    def parse(cls, text: str) -> _Header:
        """Parse the text between ``<|start|>`` and ``<|message|>``. Raises MalformedError."""
        match = _HEADER.fullmatch(text)
        if match is None:
            raise MalformedError
        name = match["first"] or match["second"] or ""
        if name.split(".")[0] in _OTHERS:
            name = ""
        return cls(match["channel"] == "analysis", name.removeprefix(NAMESPACE))


class HarmonyParser(CallParser):
    """Reads the messages of an answer: reasoning, texts and calls.

    Texts of several messages are joined by line breaks. Text outside messages is content, and a
    header that is cut off is dropped.
    """

    def __init__(
        self,
        options: CallOptions | None,
        *,
        begins_message: bool = True,
        verbatim: bool = False,
    ) -> None:
        """Make a parser of one answer.

        Args:
            options: None if calls are content.
            begins_message: the answer begins with a header, not inside a message.
            verbatim: reasoning is content, with its tags.
        """
        super().__init__(options or CallOptions({}))
        self._reads_calls = options is not None
        self._begins_message = begins_message
        self._verbatim = verbatim
        self._before: type[Content | Reasoning] | None = None
        self._shown: set[type[Content | Reasoning]] = set()

    def read_text(self) -> Steps[None]:
        source = self.source
        if self._begins_message:
            self._begins_message = False
            tag = yield from source.read_one_of((RECIPIENT, MESSAGE))
            source.start_holding(tag)
            if tag == MESSAGE:
                yield from self._read_body("")
            elif tag:
                yield from self._read_message(tag)
            else:
                source.take_held()
        while tag := (yield from source.pass_until(_MARKS, self.emit_text)):
            if tag in _ENDS:
                continue
            source.start_holding(tag)
            yield from self._read_message(tag)

    def _read_message(self, begin: str) -> Steps[None]:
        source, parts = self.source, [begin.removeprefix(START)]
        tag = yield from source.pass_until((MESSAGE, *_ENDS), parts.append)
        text = "".join(parts)
        if not tag and _CUT_HEADER.fullmatch(text):
            source.take_held()  # it has no text
            return
        if tag != MESSAGE:
            raise MalformedError
        yield from self._read_body(text)

    def _read_body(self, header_text: str) -> Steps[None]:
        """Read the rest of a message after ``<|message|>``."""
        source, header = self.source, _Header.parse(header_text)
        if header.function:
            yield from self._read_call(header.function)
        elif header.is_reasoning and self._verbatim:
            self.emit_text(source.take_held())
            self.emit_text((yield from source.pass_until(_ENDS, self.emit_text)))
        else:
            source.take_held()
            kind = Reasoning if header.is_reasoning else Content
            self._before = kind if kind in self._shown else None
            show = self._emit_reasoning if header.is_reasoning else self._emit_content
            yield from source.pass_until(_ENDS, show)

    def _read_call(self, name: str) -> Steps[None]:
        source = self.source
        if not self._reads_calls:
            raise MalformedError
        yield from source.skip_space()
        if (yield from source.is_followed_by(_ENDS)) and not source.is_over:
            self.begin_call(name)
            self.emit_arguments("{}")
            self.end_call()
        else:
            yield from pass_call(self, name, _ENDS)
        yield from source.skip_space()
        for end in _ENDS:
            yield from source.skip_tag(end)

    def _emit_reasoning(self, text: str) -> None:
        self._emit_break(Reasoning)
        self.emit_event(Reasoning(text))

    def _emit_content(self, text: str) -> None:
        self._emit_break(Content)
        self.emit_text(text)

    def _emit_break(self, kind: type[Content | Reasoning]) -> None:
        """Separate this message from the one before of the same kind."""
        if self._before is kind:
            self.emit_event(kind("\n"))
        self._before = None
        self._shown.add(kind)


# ---- Formats.


def add_text(calls: Format) -> Format:
    """Make the format of a final message or a call, which a text may precede."""
    preamble = make_tag(PREAMBLE, _make_body(), END)
    return make_choice(
        calls,
        make_sequence(preamble, make_text(NEXT), calls),
        make_sequence(make_text(FINAL), _make_body()),
    )


def prepend_analysis(content: Format) -> Format:
    """Make the format of any number of messages of reasoning with ``content`` after them."""
    messages = {
        "type": "tags_with_separator",
        "tags": [make_tag(ANALYSIS, _make_body(), END)],
        "separator": NEXT,
        "at_least_one": True,
        "stop_after_first": False,
    }
    return make_sequence(make_optional(make_sequence(messages, make_text(NEXT))), content)


def _make_body() -> Format:
    return any_text(START, CHANNEL, MESSAGE, END)
