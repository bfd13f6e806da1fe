"""Text from outside neither forges a line of the log nor controls the terminal."""

from __future__ import annotations

import io
import logging
import sys
import unicodedata
from typing import TYPE_CHECKING

import pytest

from pd.util.logs import LineFormatter
from pd.util.output import PrintableStream, printable_output, unwrap_stream
from pd.util.printable import escape_text

if TYPE_CHECKING:
    from collections.abc import Callable

FORGED = "2026-01-01 00:00:00,000 INFO pd.proxy: forged"
# What ends lines, moves the cursor, turns text round or cannot be encoded.
HOSTILE = [
    *map(chr, [*range(0x20), 0x7F, *range(0x80, 0xA0)]),
    *("\u2028", "\u2029", "\u200e", "\u200f", "\u061c", "\ufeff", "\u00ad", "\u200b"),
    *map(chr, [*range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xE0001, 0xE0041]),
    *("\ud800", "\udc80", "\udfff", "\uffff", "\ue000"),
    *("\r\n", "\x1b[2J", "\x1b]0;title\x07", "\x9b31m"),
]
PLAIN = "Grüße, 你好 שלום → \u00a0\u3000 🙂 a\\nb 'quoted' \"too\" %s %d {x}"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


def noted(text: str) -> BaseException:
    error = ValueError("x")
    error.add_note(text)
    return raised(error)


def of_kind(text: str) -> BaseException:
    """Make an exception whose class has this name, without characters that no name may have."""
    name = text.replace("\0", "").encode(errors="ignore").decode()
    return raised(type(name, (OSError,), {})())


class Odd:
    """An argument with a hostile text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


WAYS: dict[str, Callable[[logging.Logger, str], None]] = {
    "message": lambda log, text: log.warning(text.replace("%", "%%")),
    "argument": lambda log, text: log.warning("refused %s", text),
    "several": lambda log, text: log.warning("%s and %s", text, text),
    "named": lambda log, text: log.warning("refused %(rid)s", {"rid": text}),
    "repr": lambda log, text: log.warning("refused %r", Odd(text)),
    "exception": lambda log, text: log.error("failed", exc_info=raised(ValueError(text))),
    "as argument": lambda log, text: log.error("failed: %s", ValueError(text)),
    "cause": lambda log, text: log.error(
        "failed", exc_info=raised(RuntimeError("x"), raised(OSError(text)))
    ),
    "group": lambda log, text: log.error(
        "failed", exc_info=raised(ExceptionGroup(text, [ValueError(text), OSError(5, text)]))
    ),
    "note": lambda log, text: log.error("failed", exc_info=noted(text)),
    "kind": lambda log, text: log.error("failed", exc_info=of_kind(text)),
    "logger": lambda log, text: log.getChild(text).warning("refused"),
    "stack": lambda log, text: log.warning("%s", text, stack_info=True),
    "cached traceback": lambda log, text: log.handle(cached(log, text)),
}


def cached(log: logging.Logger, text: str) -> logging.LogRecord:
    """Make a record whose traceback another handler has formatted already."""
    record = log.makeRecord(log.name, logging.ERROR, __file__, 1, "failed", (), None)
    record.exc_text = f"Traceback:\n  {text}"
    return record


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    """Make a logger with pd's formatter, and return its output, too."""
    output = io.StringIO(newline="\n")
    handler = logging.StreamHandler(output)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("pd.test")
    logger.manager = logging.Manager(logging.RootLogger(logging.DEBUG))
    logger.manager.root.addHandler(handler)
    logger.addHandler(handler)
    return logger, output


@pytest.mark.parametrize("way", WAYS)
def test_no_message_forges_a_line_of_the_log(
    log: tuple[logging.Logger, io.StringIO], way: str
) -> None:
    logger, output = log
    for hostile in HOSTILE:
        output.seek(0)
        output.truncate()
        WAYS[way](logger, f"rid{hostile}{FORGED}")
        text = output.getvalue()
        assert "forged" in text
        first, *rest = text.removesuffix("\n").split("\n")
        assert first.startswith("20") and first.split()[3].startswith("pd.test")
        # Whatever follows is a traceback, which is indented.
        assert all(line.startswith("    ") for line in rest)
        if way not in ("note", "cached traceback"):  # these may have lines of their own
            assert not any(line.strip(" |+-").startswith("2026-01-01") for line in rest)
        for character in text.replace("\n", ""):
            assert unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn")
        text.encode()


@pytest.mark.parametrize("way", ["message", "argument", "exception"])
def test_printable_text_stays(log: tuple[logging.Logger, io.StringIO], way: str) -> None:
    logger, output = log
    if way != "message":
        WAYS[way](logger, PLAIN)
        assert PLAIN in output.getvalue()
    else:
        logger.warning("%s", PLAIN)
        assert output.getvalue().endswith(f": {PLAIN}\n")


def test_a_traceback_shows_the_code_line_by_line(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, output = log
    logger.error("failed", exc_info=raised(ValueError("why"), raised(OSError("cause"))))
    lines = output.getvalue().splitlines()
    assert lines.count("    Traceback (most recent call last):") == 2
    assert lines[-1] == "    ValueError: why"
    assert "    OSError: cause" in lines
    assert lines.count("        raise error from cause") == 2
    assert "    The above exception was the direct cause of the following exception:" in lines


def test_every_character_is_printable_or_escaped() -> None:
    for number in range(0x110000):
        character = chr(number)
        shown = escape_text(character)
        if shown == character:
            kind = unicodedata.category(character)
            assert kind[0] in "LMNPS" or kind == "Zs"
        else:
            assert shown.isascii() and shown.isprintable()
            assert shown.encode().decode("unicode_escape") == character


def test_commands_print_no_terminal_controls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "".join(HOSTILE)
    before = sys.stdout, sys.stderr
    with printable_output():
        print("out\t", text, PLAIN)
        print("err\t", text, PLAIN, file=sys.stderr)
        sys.stdout.writelines(["a\x1b\n", "b\n"])
        print("moves\x1b[K", file=unwrap_stream(sys.stdout))
        assert sys.stdout.isatty() is before[0].isatty()
    assert (sys.stdout, sys.stderr) == before
    out, err = capsys.readouterr()
    assert "moves\x1b[K\n" in out and "a\\x1b\n" in out
    for found in (out.replace("moves\x1b[K", ""), err):
        assert PLAIN in found
        assert set(found) & {c for c in text if c not in "\n\t "} <= set("\\[];2Jtile031mudacfxbe7")
        assert "\\x1b[2J" in found and "\\u202e" in found and "\\udc80" in found


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_the_terminal_cannot_show_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with printable_output():
        print(PLAIN, "\udc80")
    sys.stdout.flush()
    shown = raw.getvalue().decode(encoding)
    assert "\\udc80" in shown
    assert ("\\u4f60" in shown) is (encoding != "utf-8")


def test_a_wrapped_stream_forwards_everything_else() -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream = PrintableStream(raw)
    assert (stream.encoding, stream.isatty(), stream.buffer) == ("utf-8", False, raw.buffer)
    assert stream.write("a\x1b") == 2
