"""The families of models, by how they write calls, and which of them a model belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.tools import hermes, llama_json, mistral, pythonic, qwen_xml
from pd.proxy.tools.tags import CallForm, json_arguments, python_arguments, xml_arguments

if TYPE_CHECKING:
    from pd.proxy.tools.reader import CallParser


class ToolFamily(NamedTuple):
    """A way to write calls.

    Attributes:
        special: special tokens that the parser needs to see in the text.
    """

    name: str
    parser: type[CallParser]
    form: CallForm
    special: tuple[str, ...]


HERMES = ToolFamily(
    "hermes",
    hermes.HermesParser,
    CallForm(
        begin='<tool_call>\n{"name": "%s", "arguments": ',
        end="}\n</tool_call>",
        arguments=json_arguments,
        separator="\n",
        trigger=hermes.OPEN,
    ),
    (hermes.OPEN, hermes.CLOSE),
)
QWEN3_CODER = ToolFamily(
    "qwen3_coder",
    qwen_xml.QwenXmlParser,
    CallForm(
        begin="<tool_call>\n<function=%s>\n",
        end="</function>\n</tool_call>",
        arguments=xml_arguments,
        separator="\n",
        trigger=qwen_xml.OPEN,
        forbidden=(qwen_xml.FUNCTION,),
    ),
    (qwen_xml.OPEN, qwen_xml.CLOSE),
)
LLAMA3_JSON = ToolFamily(
    "llama3_json",
    llama_json.LlamaJsonParser,
    CallForm(
        begin='{"name": "%s", "parameters": ',
        end="}",
        arguments=json_arguments,
        separator="; ",
        forbidden=(llama_json.PYTHON_TAG,),
    ),
    (llama_json.PYTHON_TAG,),
)
PYTHONIC = ToolFamily(
    "pythonic",
    pythonic.PythonicParser,
    CallForm(
        begin="%s(",
        end=")",
        arguments=python_arguments,
        separator=", ",
        opening="[",
        closing="]",
    ),
    (pythonic.START, pythonic.END),
)
MISTRAL = ToolFamily(
    "mistral",
    mistral.MistralParser,
    CallForm(
        begin='{"name": "%s", "arguments": ',
        end="}",
        arguments=json_arguments,
        separator=", ",
        opening=f"{mistral.OPEN}[",
        closing="]",
        trigger=mistral.OPEN,
    ),
    (mistral.OPEN, mistral.ARGS, mistral.CALL_ID),
)
# The same parser reads what Mistral's newer models write.
_MISTRAL_NAMED = MISTRAL._replace(
    form=CallForm(
        begin=f"{mistral.OPEN}%s{mistral.ARGS}",
        end="",
        arguments=json_arguments,
        separator="",
        trigger=mistral.OPEN,
    )
)
_FAMILIES = {
    family.name: family for family in (HERMES, QWEN3_CODER, LLAMA3_JSON, PYTHONIC, MISTRAL)
}
# Texts that only the templates of a family have, the surest first. What a template asks a model to
# write goes before the tokens in it: that of Llama 4 has Python's tokens, and asks for JSON.
_MARKS = (
    (QWEN3_CODER, (qwen_xml.PARAMETER,)),
    (MISTRAL, (mistral.OPEN,)),
    (HERMES, (hermes.OPEN,)),
    (PYTHONIC, ("[func_name1(",)),
    (LLAMA3_JSON, ('"name": function name, "parameters":',)),
    (PYTHONIC, (pythonic.START,)),
    (LLAMA3_JSON, (llama_json.PYTHON_TAG,)),
)
# Texts of templates of families that are not known here, though they share tags with known ones:
# GLM, Seed-OSS and Apriel.
_FOREIGN = ("<arg_key>", "<seed:tool_call>", "<tool_calls>")


def tool_family(name: str, template: str) -> ToolFamily | None:
    """A family by its name (of ``--tool-call-parser``), or for ``auto`` that whose calls a chat
    template describes; None if it describes none that is known."""
    family = _FAMILIES.get(name)
    if name == "auto" and not _is_foreign(template):
        found = (kind for kind, marks in _MARKS if any(mark in template for mark in marks))
        family = next(found, None)
    if family is MISTRAL and mistral.ARGS in template:
        return _MISTRAL_NAMED
    return family


def _is_foreign(template: str) -> bool:
    """Whether a template describes calls of a family that is not known here."""
    # Llama 3.1 and Functionary may write JSON behind this tag.
    has_json = qwen_xml.FUNCTION in template and qwen_xml.PARAMETER not in template
    return has_json or any(mark in template for mark in _FOREIGN)
