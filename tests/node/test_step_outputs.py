"""What a node says to its proxies arrives, however much it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd.core.messages import MAX_MESSAGE_BYTES, Output, StepOutputs, TokenLogprobs, encode_message
from pd.node.step_outputs import StepOutputBuffer

if TYPE_CHECKING:
    from pd.core.messages import Message

TOP = 20


def logprobs(count: int) -> list[TokenLogprobs]:
    ids = list(range(100_000, 100_000 + TOP))
    return [TokenLogprobs(token, -1.5, ids, [-1.5] * TOP) for token in range(count)]


def test_log_probabilities_of_long_prompts_go_in_parts() -> None:
    posted: list[tuple[bytes, Message]] = []
    buffer = StepOutputBuffer("node", lambda identity, message: posted.append((identity, message)))
    sizes = {bytes([room]) * 16: size for room, size in enumerate((120_000, 0, 30_000, 10, 30_000))}
    for room, size in sizes.items():
        output = Output(room, 0, 0, [7], cached_tokens=3)
        output.prompt_logprobs = logprobs(size) if size else None
        buffer.add_output(b"proxy", output)
    buffer.send_outputs()
    outputs = []
    for identity, message in posted:
        assert identity == b"proxy"
        assert isinstance(message, StepOutputs)
        assert len(encode_message(message)) < MAX_MESSAGE_BYTES / 4
        outputs += message.outputs
    for room, size in sizes.items():
        *ahead, last = [output for output in outputs if output.room == room]
        assert all(output.token_ids == [] and output.finish is None for output in ahead)
        assert (last.token_ids, last.cached_tokens) == ([7], 3)
        parts = [part for output in (*ahead, last) for part in output.prompt_logprobs or ()]
        assert [part.token_id for part in parts] == list(range(size))
    posted.clear()
    buffer.send_outputs()
    assert not posted
