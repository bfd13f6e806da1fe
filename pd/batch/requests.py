"""Lines of a batch's input: one request each, in the format of OpenAI's Batch API."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from pd.core.brief import brief
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
# The proxy takes bodies of 8 MiB.
MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARACTERS = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Refusal(NamedTuple):
    """The reason why a request of the input is answered with an error without being sent."""

    code: str
    message: str


class BatchRequest(NamedTuple):
    """One request of the input.

    Attributes:
        url: path of the endpoint.
        content: the JSON object of ``body``, byte for byte as the line has it.
        refusal: None for a request that is sent.
    """

    custom_id: str
    url: str
    content: bytes
    refusal: Refusal | None = None


class _Line(msgspec.Struct):
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = False


_lines = msgspec.json.Decoder(_Line)
_bodies = msgspec.json.Decoder(_Body)


def parse_request(line: bytes) -> BatchRequest:
    """Parse a line of the input. Raises UsageError, which names the value but not the line."""
    try:
        line.decode()
        found = _lines.decode(line)
    except msgspec.ValidationError as error:
        if line.lstrip().startswith(b"{"):
            raise UsageError(f"cannot be read ({error}): {_shown(line)}") from None
        raise UsageError(f"must be a JSON object, not {_shown(line)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"is not valid JSON ({error}): {_shown(line)}") from None
    custom_id, method, url = found.custom_id, found.method, found.url
    content = bytes(found.body)
    for name, value in (("custom_id", custom_id), ("method", method), ("url", url)):
        if value is msgspec.UNSET:
            raise UsageError(f"has no {name}: {_shown(line)}")
        if not isinstance(value, str) or not value:
            raise UsageError(f"{name} must be a string that is not empty, not {brief(value)}")
    if len(custom_id) > MAX_ID_CHARACTERS:
        raise UsageError(
            f"custom_id has {len(custom_id)} characters, at most {MAX_ID_CHARACTERS} are allowed: "
            f"{brief(custom_id)}"
        )
    if method != "POST":
        raise UsageError(f"method must be POST, not {brief(method)}")
    if not content:
        raise UsageError(f"has no body: {_shown(line)}")
    if not content.startswith(b"{"):
        raise UsageError(f"body must be a JSON object, not {_shown(content)}")
    return BatchRequest(custom_id, url, content, _refusal(url, content))


def _refusal(url: str, content: bytes) -> Refusal | None:
    """Why a request is not sent; None for one that is. Raises UsageError for a body that cannot be
    read."""
    if url not in ENDPOINTS:
        known = " and ".join(ENDPOINTS)
        return Refusal("unsupported_url", f"url must be one of {known}, not {brief(url)}")
    try:
        stream = _bodies.decode(content).stream
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"body cannot be read ({error}): {_shown(content)}") from None
    if stream is True:
        return Refusal(
            "unsupported_stream", "stream must be false: a batch has whole answers, no events"
        )
    return None


def _shown(text: bytes) -> str:
    return brief(text[:400].decode(errors="replace").strip())


def id_digest(custom_id: str) -> bytes:
    """16 bytes that stand for a ``custom_id``, whose length they do not depend on."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def read_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, beginning with 1.

    Raises UsageError for a line of more than ``most`` bytes; its message names the number.
    """
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise UsageError(f"line {number} has more than {most >> 20} MiB")
        yield number, line


class BatchInput:
    """The input of a batch. It is read twice, so what cannot be read twice is copied to a file.

    Args:
        path: None for standard input.

    Raises UsageError if the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.name = "standard input" if path is None else str(path)
        try:
            file: BinaryIO = sys.stdin.buffer if path is None else path.open("rb")
            if path is None or not file.seekable():
                copy = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close
                with file:
                    shutil.copyfileobj(file, copy)
                file = copy
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror}") from None
        self._file = file

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def check(self) -> set[bytes]:
        """Check every line, and return the digests of all ids.

        Raises UsageError, which names the first line with an error and says how many others have
        one.
        """
        places: dict[bytes, int] = {}
        first, others = "", 0
        for number, line in self._lines():
            try:
                custom_id = parse_request(line).custom_id
                earlier = places.setdefault(id_digest(custom_id), number)
                if earlier != number:
                    raise UsageError(f"custom_id {brief(custom_id)} is that of line {earlier}, too")
            except UsageError as error:
                others += bool(first)
                first = first or f"line {number}: {error.message}"
        if first:
            more = f" ({others} more lines have errors)" if others > 1 else ""
            more = " (one more line has an error)" if others == 1 else more
            raise UsageError(f"{self.name} {first}{more}; nothing was sent")
        if not places:
            raise UsageError(f"{self.name} has no requests: it has no line that is not blank")
        return set(places)

    def requests(self) -> Iterator[BatchRequest]:
        """Yield the requests. Raises UsageError for a file that has changed and has errors now."""
        for number, line in self._lines():
            try:
                yield parse_request(line)
            except UsageError as error:
                raise UsageError(f"{self.name} line {number}: {error.message}") from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank."""
        self._file.seek(0)
        try:
            for number, line in read_lines(self._file, MAX_LINE_BYTES):
                text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield number, text
        except UsageError as error:
            raise UsageError(f"{self.name} {error.message}") from None
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror}") from None
