"""``/v1/files``, OpenAI's Files API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from pd.core.brief import short_repr
from pd.core.errors import InvalidRequestError, NotFoundError
from pd.proxy.api.large_answers import LargeAnswers, send_pieces
from pd.proxy.http.json_responses import json_response, read_request_id
from pd.proxy.http.multipart import FormParser, PartStart, read_boundary
from pd.proxy.http.typed_routes import ClientRequest
from pd.proxy.storage.files import FILE_SECONDS, MAX_FILES, MIN_FILE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd.proxy.api.answer_schemas import FileList, FileObject
    from pd.proxy.storage.files import FileStore, NewFile, StoredFile

# The only use of a file that we have an endpoint for.
PURPOSE = "batch"
MAX_FILENAME_CHARACTERS = 255
# Limit of a field's value.
_MAX_VALUE_BYTES = 1 << 10
_MAX_LISTED = 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
# For the API's description.
UPLOAD_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "The content, with a filename.",
                        },
                        "purpose": {"enum": [PURPOSE], "description": "The use of the file."},
                        _ANCHOR: {"enum": ["created_at"], "description": "Begin of the lifetime."},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": MIN_FILE_SECONDS,
                            "maximum": int(FILE_SECONDS),
                            "description": "Lifetime in seconds.",
                        },
                    },
                }
            }
        },
    }
}


class FilesAPI:
    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._answers = LargeAnswers()

    async def upload_file(self, request: ClientRequest) -> Response:
        """Stores a file of a form."""
        boundary = read_boundary(request.headers.get("content-type", ""))
        async with self._store.open_upload(request.caller.owner) as content:
            form = _UploadForm(boundary, content)
            async for chunk in request.stream():
                await form.feed(chunk)
            filename, purpose, seconds = form.check()
            owner = request.caller.owner
            file = await self._store.add_file(owner, content, filename, purpose, seconds)
        return json_response(_describe_file(file))

    async def list_files(self, request: ClientRequest) -> Response:
        """Lists the files of the client's key, the newest first."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(
                f"order must be asc or desc, not {short_repr(order)}", param="order"
            )
        limit = min(MAX_FILES, parse_number("limit", query.get("limit"), 1, _MAX_LISTED))
        files = await self._store.list_files(
            request.caller.owner,
            after=query.get("after"),
            limit=limit + 1,
            is_ascending=order == "asc",
            purpose=query.get("purpose"),
        )
        shown = [_describe_file(file) for file in files[:limit]]
        answer: FileList = {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(files) > limit,
        }
        return json_response(answer)

    async def get_file(self, request: ClientRequest, file_id: str) -> Response:
        """Describes a file."""
        return json_response(
            _describe_file(await self._store.get_file(request.caller.owner, file_id))
        )

    async def get_content(self, request: ClientRequest, file_id: str) -> None:
        """The content of a file."""
        owner = request.caller.owner
        file = await self._store.get_file(owner, file_id)
        with self._answers.take_turn(owner, file.size):
            # Later errors have no status any more, so we read the first block before.
            block = await self._store.read_block(file.name, 0)
            await self._send_content(request, file, block)

    async def _send_content(self, request: ClientRequest, file: StoredFile, block: bytes) -> None:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(file.size).encode()),
            (b"content-disposition", b"attachment"),
            (b"x-content-type-options", b"nosniff"),
            (b"x-request-id", read_request_id(request.scope).encode()),
        ]
        await request.start_response(200, headers)
        if request.method == "HEAD":
            await request.send_part(b"", is_last=True)
            return
        await send_pieces(request, file.size, self._read_blocks(file, block))

    async def _read_blocks(self, file: StoredFile, block: bytes) -> AsyncIterator[bytes]:
        place = 0
        while block:
            yield block
            place += len(block)
            try:
                block = await self._store.read_block(file.name, place)
            except NotFoundError:
                return  # deleted meanwhile

    async def delete_file(self, request: ClientRequest, file_id: str) -> Response:
        """Deletes a file."""
        await self._store.delete_file(request.caller.owner, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class _UploadForm:
    """The form of an upload: its file goes to the disk, and its other fields are kept."""

    def __init__(self, boundary: bytes, content: NewFile) -> None:
        self._parser = FormParser(boundary)
        self._content = content
        self._filename: str | None = None
        # None while the file arrives.
        self._field: bytearray | None = None
        self._fields: dict[str, bytearray] = {}

    async def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises InvalidRequestError, and as :meth:`NewFile.write` does."""
        for event in self._parser.feed(data):
            if isinstance(event, PartStart):
                self._start_part(event)
            elif self._field is None:
                await self._content.write(event)
            else:
                self._field += event
                if len(self._field) > _MAX_VALUE_BYTES:
                    raise InvalidRequestError(
                        f"a field of the form has more than {_MAX_VALUE_BYTES} bytes; send the "
                        "content as 'file'"
                    )

    def _start_part(self, part: PartStart) -> None:
        if part.name != "file":
            self._field = self._fields[part.name] = bytearray()
            return
        if self._filename is not None:
            raise InvalidRequestError("file: the form has two files; send one", param="file")
        # Some encodings of filenames have characters that are no text.
        filename = (part.filename or "").encode(errors="replace").decode()
        if not 0 < len(filename) <= MAX_FILENAME_CHARACTERS:
            raise InvalidRequestError(
                f"file: its filename must have 1 to {MAX_FILENAME_CHARACTERS} characters, not "
                f"{len(filename)}",
                param="file",
            )
        self._filename, self._field = filename, None

    def check(self) -> tuple[str, str, float]:
        """Return the file's name, its purpose, and its lifetime in seconds, once the form is
        complete. Raises InvalidRequestError."""
        self._parser.check_end()
        if self._filename is None:
            raise InvalidRequestError("file: missing; send the content as 'file'", param="file")
        if not self._content.size:
            raise InvalidRequestError("file: empty; send a content", param="file")
        purpose = self._read_field("purpose")
        if purpose != PURPOSE:
            raise InvalidRequestError(
                f"purpose must be {PURPOSE!r}, not {short_repr(purpose)}", param="purpose"
            )
        anchor, given = self._read_field(_ANCHOR), self._read_field(_SECONDS)
        if anchor is None and given is None:
            return self._filename, purpose, FILE_SECONDS
        if anchor != "created_at":
            raise InvalidRequestError(
                f"{_ANCHOR} must be 'created_at', not {short_repr(anchor)}", param="expires_after"
            )
        seconds = parse_number(_SECONDS, given or "", MIN_FILE_SECONDS, int(FILE_SECONDS))
        return self._filename, purpose, seconds

    def _read_field(self, name: str) -> str | None:
        value = self._fields.get(name)
        return None if value is None else value.decode(errors="replace")


def parse_number(name: str, text: str | None, least: int, most: int) -> int:
    """Parse an integer; ``most`` for None. Raises InvalidRequestError."""
    if text is None:
        return most
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        raise InvalidRequestError(
            f"{name} must be an integer from {least} to {most}, not {short_repr(text)}",
            param=name.partition("[")[0],
        )
    return int(text)


def _describe_file(file: StoredFile) -> FileObject:
    return {
        "id": file.name,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created),
        "expires_at": int(file.expires),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
