"""Types for fields of request models, and errors that name the field, its value and the remedy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pd.core.brief import short_repr
from pd.core.sampling_params import TOKEN_ID_LIMIT
from pd.proxy.text.stop_patterns import MAX_PATTERN_CHARACTERS

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

_TYPE_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
PROBLEM = "problem"
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 63) - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_OPTIONS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_CHARACTERS = 4096
# An error names at most this many wrong keys.
_SHOWN = 8
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
_PART = 1 << 16


def describe_value(value: object) -> str:
    """Describe a client's value for an error: shortened, with its type."""
    return f"{short_repr(value)} ({_TYPE_NAMES.get(type(value), type(value).__name__)})"


def make_problem(text: str, *path: str | int) -> PydanticCustomError:
    """Make an error for a validator to raise. Its message is the field's name, then ``text``.

    ``path`` leads from the validated field to the wrong one inside it.
    """
    return PydanticCustomError(PROBLEM, "{text}", {"text": text, "path": path})


def make_mismatch(wanted: str, value: object, *path: str | int) -> PydanticCustomError:
    """Make the error for a value of the wrong type or range."""
    return make_problem(f"must be {wanted}, not {describe_value(value)}", *path)


def are_all(kind: type, values: list[Any]) -> bool:
    """Return whether every value has exactly this type.

    We check long lists in parts, so that other threads can run in between.
    """
    parts = (values[i : i + _PART] for i in range(0, len(values), _PART))
    return all({*map(type, part)} == {kind} for part in parts)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Annotation for the range of a number. With ``above``, the range excludes ``low``."""

    low: float
    high: float
    above: bool = False

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check_value, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            **handler(schema),
            "exclusiveMinimum" if self.above else "minimum": self.low,
            "maximum": self.high,
        }

    def _check_value(self, value: float) -> float:
        if self.above and not self.low < value <= self.high:
            raise make_mismatch(f"above {self.low:g} and at most {self.high:g}", value)
        if not self.low <= value <= self.high:
            raise make_mismatch(f"between {self.low} and {self.high}", value)
        return value


def _is_integer(value: object) -> bool:
    """Return whether JSON Schema considers a number an integer, like ``5.0``."""
    return type(value) is int or (isinstance(value, float) and value.is_integer())


def _check_integer(value: Any) -> int:
    if not _is_integer(value):
        raise make_mismatch("an integer", value)
    if not MIN_INTEGER <= value <= MAX_INTEGER:
        raise make_mismatch("an integer of at most 64 bits", value)
    return int(value)


# Use this instead of a plain ``int``, because an integer of hundreds of digits would fail in C code
# and in float arithmetic.
Integer = Annotated[int, PlainValidator(_check_integer, json_schema_input_type=int)]


# ---- Types with long lists. We validate them here, because pydantic would check a list in a single
# call while all other threads wait.

_PROMPT = "a string, a list of token ids, or a list of either"
_TEXT = "a string or a list of strings"
_INPUT_IDS = "a list of token ids or a list of such lists"
PromptValue = str | list[str] | list[int] | list[list[int]]


def read_integers(value: object) -> list[int] | None:
    """Return a list of integers, the same list if possible; None if any item is not an integer."""
    if not isinstance(value, list):
        return None
    if are_all(int, value):
        return value
    return [int(item) for item in value] if all(map(_is_integer, value)) else None


def _check_prompts(value: object, wanted: str, *, texts: bool, ids: bool) -> object:
    if texts and isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise make_mismatch(wanted, value)
    if not value:
        raise make_problem("is empty; send at least one token")
    if texts and are_all(str, value):
        return value
    # The first item shows the client's intention, so we name the first item that differs from it.
    first = value[0]
    if ids and isinstance(first, list):
        lists = list(map(read_integers, value))
        if None not in lists:
            return lists
        odd = value[lists.index(None)]
    elif ids and _is_integer(first):
        integers = read_integers(value)
        if integers is not None:
            return integers
        odd = next(item for item in value if not _is_integer(item))
    else:
        odd = next((item for item in value if type(item) is not type(first)), first)
    raise make_problem(f"must be {wanted}, but it contains {describe_value(odd)}")


def _check_token_lists(value: object) -> object:
    if value == []:
        return value
    checked = _check_prompts(value, _INPUT_IDS, texts=False, ids=True)
    assert isinstance(checked, list)
    # Checked here, too, because nobody compares them with the vocabulary without log probabilities.
    for ids in checked if isinstance(checked[0], list) else [checked]:
        if wrong := [item for item in ids if not 0 <= item < TOKEN_ID_LIMIT]:
            raise make_mismatch("lists of token ids", wrong[0])
    return checked


def _check_integers(value: object) -> object:
    integers = read_integers(value)
    if integers is None:
        raise make_mismatch("a list of integers", value)
    return integers


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or (stops and not are_all(str, stops)):
        raise make_mismatch(_TEXT, value)
    if len(stops) > MAX_STOP_STRINGS:
        raise make_mismatch(f"at most {MAX_STOP_STRINGS} strings", value)
    if "" in stops:
        raise make_problem("may not contain an empty string")
    if (size := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
        raise make_problem(f"must have at most {MAX_STOP_CHARACTERS} characters in all, not {size}")
    return tuple(stops)


def _check_bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or (value and not are_all(str, value)):
        raise make_mismatch("a list of texts", value)
    if len(value) > MAX_BAD_WORDS:
        raise make_problem(f"has {len(value)} texts; at most {MAX_BAD_WORDS} are allowed")
    if not all(map(str.strip, value)):
        raise make_problem("may not contain an empty text")
    if (size := sum(map(len, value))) > MAX_BAD_CHARACTERS:
        raise make_problem(f"must have at most {MAX_BAD_CHARACTERS} characters in all, not {size}")
    return tuple(value)


def _check_allowed_tokens(value: object) -> object:
    integers = _check_integers(value)
    if not integers:
        raise make_problem("is empty, so no token could be drawn; leave it out, or name tokens")
    return integers


def _check_stop_patterns(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    patterns = [value] if isinstance(value, str) and value else value or []
    if not isinstance(patterns, list) or not are_all(str, patterns):
        raise make_mismatch("a regular expression or a list of them", value)
    if (size := sum(map(len, patterns))) > MAX_PATTERN_CHARACTERS:
        raise make_problem(
            f"must have at most {MAX_PATTERN_CHARACTERS} characters in all, not {size}"
        )
    return tuple(patterns)


def _check_choices(value: object) -> list[str | list[int]]:
    if not isinstance(value, list):
        raise make_mismatch("a list of texts or lists of token ids", value)
    if not 0 < len(value) <= MAX_OPTIONS:
        raise make_problem(f"must have 1 to {MAX_OPTIONS} options, not {len(value)}")
    options: list[str | list[int]] = []
    for number, item in enumerate(value):
        option = item if isinstance(item, str) else read_integers(item)
        if option is None:
            raise make_mismatch("a text or a list of token ids", item, number)
        if not option:
            raise make_problem("is empty; an option needs at least one token", number)
        options.append(option)
    return options


def _check_choice_texts(value: object) -> object:
    if not isinstance(value, list):
        raise make_mismatch("a list of texts", value)
    if not 0 < len(value) <= MAX_OPTIONS:
        raise make_problem(f"must have 1 to {MAX_OPTIONS} texts, not {len(value)}")
    if not are_all(str, value):
        raise make_mismatch("a list of texts", value)
    if "" in value:
        raise make_problem("may not contain an empty text")
    return value


def _check_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise make_mismatch("an object", value)
    result = {}
    # We refuse leading zeros, because such an id could repeat the token of another entry.
    wrong = [key for key in value if not _TOKEN_ID.fullmatch(key)]
    if wrong:
        keys = ", ".join(map(describe_value, wrong[:_SHOWN])) + (
            ", …" if len(wrong) > _SHOWN else ""
        )
        named = f"key{'s' if len(wrong) > 1 else ''} {keys}"
        raise make_problem(
            f"must map token ids to numbers, but has the {named}; write ids like 17, without signs "
            "or leading zeros"
        )
    for key, bias in value.items():
        if type(bias) not in (int, float) or abs(bias) > 1e300 or not math.isfinite(bias):
            raise make_mismatch("a finite number", bias, key)
        result[int(key)] = float(bias)
    return result


Prompts = Annotated[
    PromptValue,
    PlainValidator(
        partial(_check_prompts, wanted=_PROMPT, texts=True, ids=True),
        json_schema_input_type=PromptValue,
    ),
]
Texts = Annotated[
    str | list[str],
    PlainValidator(
        partial(_check_prompts, wanted=_TEXT, texts=True, ids=False),
        json_schema_input_type=str | list[str],
    ),
]
TokenIds = Annotated[
    list[int] | list[list[int]],
    PlainValidator(
        partial(_check_prompts, wanted=_INPUT_IDS, texts=False, ids=True),
        json_schema_input_type=list[int] | list[list[int]],
    ),
]
TokenLists = Annotated[
    list[int] | list[list[int]],
    PlainValidator(_check_token_lists, json_schema_input_type=list[int] | list[list[int]]),
]
Integers = Annotated[list[int], PlainValidator(_check_integers, json_schema_input_type=list[int])]
AllowedTokens = Annotated[
    list[int], PlainValidator(_check_allowed_tokens, json_schema_input_type=list[int])
]
BadWords = Annotated[
    tuple[str, ...], PlainValidator(_check_bad_words, json_schema_input_type=list[str])
]
StopStrings = Annotated[
    tuple[str, ...], PlainValidator(_check_stop, json_schema_input_type=str | list[str])
]
StopPatterns = Annotated[
    tuple[str, ...], PlainValidator(_check_stop_patterns, json_schema_input_type=str | list[str])
]
Choices = Annotated[
    list[str | list[int]],
    PlainValidator(_check_choices, json_schema_input_type=list[str | list[int]]),
]
ChoiceTexts = Annotated[
    list[str], PlainValidator(_check_choice_texts, json_schema_input_type=list[str])
]
LogitBias = Annotated[
    dict[int, float], PlainValidator(_check_logit_bias, json_schema_input_type=dict[str, float])
]


def split_prompts(value: PromptValue) -> tuple[list[str | list[int]], bool]:
    """Return the prompts of a valid field, and whether the field holds a list of prompts."""
    if isinstance(value, str) or type(value[0]) is int:
        return [value], False
    return list(value), True  # type: ignore[arg-type]  # a list of texts or of lists of ids
