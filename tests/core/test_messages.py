"""Messages with impossible values are refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from pd.core.messages import Commit, TakeBack, TakenBack, decode_message, encode_message


def commit(**fields: float) -> bytes:
    message = Commit(to="D", sender="P", room=bytes(16), epoch=1, num_bytes=8, first_tokens=[])
    return encode_message(msgspec.structs.replace(message, **fields))


@pytest.mark.parametrize("field", ["wire_seconds", "exposed_seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e9])
def test_impossible_durations_are_refused(field: str, value: float) -> None:
    assert getattr(decode_message(commit(**{field: 0.5})), field) == 0.5
    with pytest.raises(msgspec.ValidationError, match=field):
        decode_message(commit(**{field: value}))


@pytest.mark.parametrize("length", [0, 15, 17, 1 << 20])
def test_a_room_to_take_back_has_sixteen_bytes(length: int) -> None:
    for message in (
        TakeBack(to="P", sender="proxy", room=bytes(length)),
        TakenBack(to="proxy", sender="P", room=bytes(length), taken=True),
    ):
        with pytest.raises(msgspec.ValidationError, match="room"):
            decode_message(encode_message(message))
