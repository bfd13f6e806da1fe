"""Fields of a request from which a grammar, or a part of it, was made."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from pd.core.grammar import Grammar
    from pd.proxy.tools.tags import CallForm

_STEP = re.compile(r"\w+")


def parameters_field(number: int) -> str:
    """The field with the parameters of a function, by its number among all functions."""
    return f"tools[{number}].function.parameters"


class GrammarFields(NamedTuple):
    """The fields that one grammar was made from.

    Attributes:
        whole: all of it.
        content: a schema of a structural tag that is outside of calls.
        numbers: where the functions that a structural tag calls stand in the request.
        form: how it writes calls; None if there are none.
    """

    whole: str
    content: str
    numbers: dict[str, int]
    form: CallForm | None

    @classmethod
    def of(cls, field: str) -> GrammarFields:
        """One field with all of it."""
        return cls(field, field, {}, None)

    def renamed(self, error: InvalidRequestError, grammar: Grammar) -> InvalidRequestError:
        """A node's error about a grammar, which the client has not sent, by the client's field."""
        param, kind = error.param or "", grammar.kind
        if not param.startswith(kind):
            return error
        steps = _STEP.findall(param.removeprefix(kind))
        field = self._field(json.loads(grammar.text), steps) if steps else self.whole
        return InvalidRequestError(field + error.message.removeprefix(param), param=field)

    def _field(self, part: Any, steps: list[str]) -> str:
        for step in steps:
            if isinstance(part, list):
                part = part[int(step)] if step.isdecimal() and int(step) < len(part) else None
                continue
            if not isinstance(part, dict):
                break
            name = None if self.form is None else self.form.called_by(part.get("begin"))
            if name in self.numbers:
                return parameters_field(self.numbers[name])
            part = part.get(step)
        return self.content
