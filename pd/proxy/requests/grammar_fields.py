"""Maps errors about a grammar to the fields of the request."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pd.core.errors import InvalidRequestError
from pd.proxy.requests.field_names import CHAT_NAMES, FieldNames
from pd.proxy.text.tools.functions import name_parameters_field

if TYPE_CHECKING:
    from pd.core.grammar import Grammar
    from pd.proxy.text.tools.tags import CallForm

_STEP = re.compile(r"\w+")


class GrammarFields(NamedTuple):
    """The fields from which we made a grammar.

    Attributes:
        whole: field for errors about the whole grammar.
        content: field of the schemas outside calls.
        numbers: positions of the called functions in the request.
        form: the form of the calls; None if the grammar has none.
        names: names of the fields in the client's API.
    """

    whole: str
    content: str
    numbers: dict[str, int]
    form: CallForm | None
    names: FieldNames = CHAT_NAMES

    @classmethod
    def from_field(cls, field: str) -> GrammarFields:
        """Map the whole grammar to one field."""
        return cls(field, field, {}, None)

    def rename_error(self, error: InvalidRequestError, grammar: Grammar) -> InvalidRequestError:
        """Let a node's error about a grammar name the client's field.

        The client sent that field, not the grammar.
        """
        param, kind = error.param or "", grammar.kind
        if not param.startswith(kind):
            return error
        steps = _STEP.findall(param.removeprefix(kind))
        field = self._find_field(json.loads(grammar.text), steps) if steps else self.whole
        renamed = InvalidRequestError(field + error.message.removeprefix(param), param=field)
        return self.names.rename_error(renamed)

    def _find_field(self, part: Any, steps: list[str]) -> str:
        for step in steps:
            if isinstance(part, list):
                part = part[int(step)] if step.isdecimal() and int(step) < len(part) else None
                continue
            if not isinstance(part, dict):
                break
            name = None if self.form is None else self.form.find_function(part.get("begin"))
            if name in self.numbers:
                return name_parameters_field(self.numbers[name])
            part = part.get(step)
        return self.content
