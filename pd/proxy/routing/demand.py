"""A request as routing sees it: its prompt and the requested answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    IntArray = npt.NDArray[np.int32]

# Number of output tokens for which a node should have memory.
_EXPECTED_OUTPUT = 512


class Prompt:
    """The properties of a prompt that matter for routing.

    Attributes:
        token_ids: int32 ``[n]``, immutable.
        namespace: separates cached prefixes.
    """

    __slots__ = ("_data", "namespace", "token_ids")

    def __init__(self, token_ids: IntArray, namespace: str) -> None:
        self.token_ids = token_ids
        self.namespace = namespace
        self._data: bytes | None = None

    @property
    def data(self) -> bytes:
        """The memory of the token ids, for lookups of prefixes.

        A long prompt has some hundred kilobytes. We copy them at the first lookup, and never if no
        node has any prefix.
        """
        if self._data is None:
            self._data = self.token_ids.tobytes()
        return self._data

    def followed_by(self, output_ids: Sequence[int]) -> Prompt:
        """Return the prompt with output appended. Copies the prompt once."""
        output = np.array(output_ids, dtype=np.int32)
        data = b"".join([np.ascontiguousarray(self.token_ids).data, output.data])
        extended = Prompt(np.frombuffer(data, np.int32), self.namespace)
        extended._data = data
        return extended


class Demand(NamedTuple):
    """The properties of a request that determine its outcome.

    Attributes:
        streams: number of answers (``n``).
        output: maximum number of tokens of each answer.
        waited: seconds since the request arrived.
    """

    prompt: Prompt
    streams: int = 1
    output: int = _EXPECTED_OUTPUT
    waited: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    @property
    def tokens(self) -> int:
        """Tokens for which nodes should have memory."""
        return self.length + self.streams * min(self.output, _EXPECTED_OUTPUT)
