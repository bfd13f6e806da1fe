"""Requests of a batch: one per line of the input, in the format of OpenAI's Batch API."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from pd.core.brief import short_repr
from pd.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# The proxy accepts bodies of 8 MiB, which escapes may double.
MAX_LINE_BYTES = 16 << 20
MAX_ID_CHARACTERS = 512
# Most errors that a survey keeps.
MAX_SHOWN_ERRORS = 100
# Reasons of errors that several places find.
_INVALID_JSON, _MISSING = "invalid_json_line", "missing_required_parameter"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineError(UsageError):
    """A line of the input cannot be a request.

    Attributes:
        code: the reason in OpenAI's words.
        line: number of the line, from 1; 0 for the whole file.
    """

    def __init__(self, message: str, code: str = "invalid_value", line: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.line = line


class LineSurvey(NamedTuple):
    """The lines of an input.

    Attributes:
        ids: digests of all ids.
        errors: the first lines with an error.
        num_errors: number of all lines with an error.
    """

    ids: set[bytes]
    errors: list[LineError]
    num_errors: int


class Refusal(NamedTuple):
    """Why we answer a request with an error instead of sending it."""

    code: str
    message: str


class BatchRequest(NamedTuple):
    """One request of the input.

    Attributes:
        url: path of the endpoint.
        content: the JSON object of ``body``, byte for byte as in the line.
        refusal: None unless we answer it ourselves.
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


def parse_request(line: bytes, endpoint: str | None = None) -> BatchRequest:
    """Parse a line of the input. Raises LineError, which names the value but not the line.

    Args:
        endpoint: the only allowed url. Without it, other urls than ENDPOINTS are refusals.
    """
    try:
        line.decode()
        fields = _lines.decode(line)
    except msgspec.ValidationError as error:
        if line.lstrip().startswith(b"{"):
            message = f"cannot be read ({error}): {_shorten_line(line)}"
        else:
            message = f"must be a JSON object, not {_shorten_line(line)}"
        raise LineError(message, _INVALID_JSON) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"is not valid JSON ({error}): {_shorten_line(line)}"
        raise LineError(message, _INVALID_JSON) from None
    custom_id, method, url = fields.custom_id, fields.method, fields.url
    content = bytes(fields.body)
    for name, value in (("custom_id", custom_id), ("method", method), ("url", url)):
        if value is msgspec.UNSET:
            raise LineError(f"has no {name}: {_shorten_line(line)}", _MISSING)
        if not isinstance(value, str) or not value:
            raise LineError(f"{name} must be a string that is not empty, not {short_repr(value)}")
    if len(custom_id) > MAX_ID_CHARACTERS:
        raise LineError(
            f"custom_id has {len(custom_id)} characters, at most {MAX_ID_CHARACTERS} are allowed: "
            f"{short_repr(custom_id)}"
        )
    if method != "POST":
        raise LineError(f"method must be POST, not {short_repr(method)}", "invalid_method")
    if endpoint is not None and url != endpoint:
        message = f"url must be the batch's endpoint {endpoint}, not {short_repr(url)}"
        raise LineError(message, "invalid_url")
    if not content:
        raise LineError(f"has no body: {_shorten_line(line)}", _MISSING)
    if not content.startswith(b"{"):
        raise LineError(f"body must be a JSON object, not {_shorten_line(content)}")
    known = ENDPOINTS if endpoint is None else (endpoint,)
    return BatchRequest(custom_id, url, content, _find_refusal(url, known, content))


def _find_refusal(url: str, known: Sequence[str], content: bytes) -> Refusal | None:
    """Return why we do not send a request; None if we do. Raises LineError for an invalid body."""
    if url not in known:
        names = ", ".join(known)
        return Refusal("unsupported_url", f"url must be one of {names}, not {short_repr(url)}")
    try:
        stream = _bodies.decode(content).stream
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"body cannot be read ({error}): {_shorten_line(content)}"
        raise LineError(message, _INVALID_JSON) from None
    if stream is True:
        return Refusal(
            "unsupported_stream", "stream must be false: a batch has whole answers, no events"
        )
    return None


def _shorten_line(text: bytes) -> str:
    return short_repr(text[:400].decode(errors="replace").strip())


def id_digest(custom_id: str) -> bytes:
    """Return a digest of 16 bytes for a ``custom_id`` of any length."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def read_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, from 1.

    Raises UsageError for a line of more than ``limit`` bytes; its message names the number.
    """
    number = 0
    while line := file.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise UsageError(f"line {number} has more than {limit >> 20} MiB")
        yield number, line


class BatchInput:
    """The input of a batch. We read it twice, so we copy a pipe to a file first.

    Args:
        path: None for standard input.
        name: name for messages; the path if None.
        endpoint: see :func:`parse_request`.

    Raises UsageError if the file cannot be opened.
    """

    def __init__(
        self, path: Path | None, *, name: str | None = None, endpoint: str | None = None
    ) -> None:
        self.name = name or ("standard input" if path is None else str(path))
        self._endpoint = endpoint
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

    def survey_lines(self, limit: int | None = None) -> LineSurvey:
        """Check every line.

        Args:
            limit: most requests. We read no further than the first line beyond it.

        Raises UsageError if the file cannot be read, or a line is too long.
        """
        places: dict[bytes, int] = {}
        errors: list[LineError] = []
        num_errors = 0
        for number, line in self._read_lines():
            try:
                if limit is not None and len(places) + num_errors >= limit:
                    raise LineError(f"a batch has at most {limit} requests", "too_many_requests")
                custom_id = parse_request(line, self._endpoint).custom_id
                earlier = places.setdefault(id_digest(custom_id), number)
                if earlier != number:
                    raise LineError(
                        f"custom_id {short_repr(custom_id)} is already in line {earlier}",
                        "duplicate_custom_id",
                    )
            except LineError as error:
                num_errors += 1
                if len(errors) < MAX_SHOWN_ERRORS:
                    error.line = number
                    errors.append(error)
                if error.code == "too_many_requests":
                    break
        if not places and not errors:
            errors = [LineError("has no requests: all its lines are blank", "empty_file")]
            num_errors = 1
        return LineSurvey(set(places), errors, num_errors)

    def check_lines(self) -> set[bytes]:
        """Check every line; return the digests of all ids.

        Raises UsageError, which names the first line with an error and counts the others.
        """
        ids, errors, num_errors = self.survey_lines()
        if not errors:
            return ids
        first, others = errors[0], num_errors - 1
        if not first.line:
            raise UsageError(f"{self.name} {first.message}")
        more = f" ({others} more lines have errors)" if others > 1 else ""
        more = " (one more line has an error)" if others == 1 else more
        raise UsageError(f"{self.name} line {first.line}: {first.message}{more}; nothing was sent")

    def read_requests(self) -> Iterator[BatchRequest]:
        """Yield the requests. Raises UsageError if the file has changed and has errors now."""
        for number, line in self._read_lines():
            try:
                yield parse_request(line, self._endpoint)
            except LineError as error:
                raise UsageError(f"{self.name} line {number}: {error.message}") from None

    def _read_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield all lines except blank ones."""
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
