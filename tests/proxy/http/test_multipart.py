"""A form means the same in whatever pieces it arrives."""

from __future__ import annotations

from pd.proxy.http.multipart import FormParser, PartStart

FORM = (
    b'text before\r\n--b \r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
    b"Content-Type: text/plain\r\n\r\none\r\n--x\r\n\r\n--bb is not the boundary\r\n"
    b'--b\r\nContent-Disposition: form-data; name="none"\r\n\r\n\r\n--b--\r\nrest\r\n--b\r\n'
).replace(b"--bb is", b"-- bb is")
PARTS = [
    (PartStart("file", "a"), b"one\r\n--x\r\n\r\n-- bb is not the boundary"),
    (PartStart("none", None), b""),
]


def parse(pieces: list[bytes]) -> list[tuple[PartStart, bytes]]:
    parser, parts = FormParser(b"b"), list[tuple[PartStart, bytes]]()
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, PartStart):
                parts.append((event, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + event)
    parser.check_end()
    return parts


def test_pieces_of_every_size() -> None:
    for size in range(1, len(FORM) + 1):
        assert parse([FORM[i : i + size] for i in range(0, len(FORM), size)]) == PARTS, size
    for place in range(len(FORM)):
        assert parse([FORM[:place], FORM[place:]]) == PARTS, place
