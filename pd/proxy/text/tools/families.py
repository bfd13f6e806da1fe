"""The known families of models, and how to recognize a model's family."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from pd.proxy.text.tools import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    llama_json,
    mistral,
    phi,
    pythonic,
    qwen_xml,
)
from pd.proxy.text.tools.argument_formats import (
    TagLayout,
    make_json_arguments,
    make_numbered_arguments,
    make_python_arguments,
)
from pd.proxy.text.tools.delimited_formats import make_delimited_arguments
from pd.proxy.text.tools.tags import CallForm

if TYPE_CHECKING:
    from pd.proxy.text.tools.reader import CallParser


class ToolFamily(NamedTuple):
    """A way to write calls.

    Attributes:
        special: special tokens that the parser needs to see.
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
        make_arguments=make_json_arguments,
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
        make_arguments=TagLayout(
            begin=f"{qwen_xml.PARAMETER}%s>\n",
            end=qwen_xml.END_PARAMETER,
            line_break="\n",
            after="\n",
            following=(qwen_xml.PARAMETER, qwen_xml.END_FUNCTION, qwen_xml.CLOSE),
        ).make_arguments,
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
        make_arguments=make_json_arguments,
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
        make_arguments=make_python_arguments,
        separator=", ",
        opening="[",
        closing="]",
        forbidden=(pythonic.BLOCK,),
    ),
    (pythonic.START, pythonic.END),
)
MISTRAL = ToolFamily(
    "mistral",
    mistral.MistralParser,
    CallForm(
        begin='{"name": "%s", "arguments": ',
        end="}",
        make_arguments=make_json_arguments,
        separator=", ",
        opening=f"{mistral.OPEN}[",
        closing="]",
        trigger=mistral.OPEN,
    ),
    (mistral.OPEN, mistral.ARGS, mistral.CALL_ID),
)
# Mistral's newer models write another form. The same parser reads both.
_MISTRAL_NAMED = MISTRAL._replace(
    form=CallForm(
        begin=f"{mistral.OPEN}%s{mistral.ARGS}",
        end="",
        make_arguments=make_json_arguments,
        separator="",
        trigger=mistral.OPEN,
    )
)
DEEPSEEK_V3 = ToolFamily(
    "deepseek_v3",
    deepseek.DeepSeekParser,
    CallForm(
        begin=f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}%s\n{deepseek.FENCE}json\n",
        end=f"\n{deepseek.FENCE}{deepseek.CALL_END}",
        make_arguments=make_json_arguments,
        separator="\n",
        opening=deepseek.CALLS_BEGIN,
        closing=deepseek.CALLS_END,
        trigger=deepseek.CALLS_BEGIN,
        forbidden=(deepseek.CALL_BEGIN,),
    ),
    deepseek.TAGS,
)
DEEPSEEK_V31 = ToolFamily(
    "deepseek_v31",
    deepseek.DeepSeekParser,
    CallForm(
        begin=f"{deepseek.CALL_BEGIN}%s{deepseek.SEPARATOR}",
        end=deepseek.CALL_END,
        make_arguments=make_json_arguments,
        separator="",
        opening=deepseek.CALLS_BEGIN,
        closing=deepseek.CALLS_END,
        trigger=deepseek.CALLS_BEGIN,
        forbidden=(deepseek.CALL_BEGIN,),
    ),
    deepseek.TAGS,
)
GLM45 = ToolFamily(
    "glm45",
    glm.GlmParser,
    CallForm(
        begin=f"{glm.OPEN}%s\n",
        end=glm.CLOSE,
        make_arguments=TagLayout(
            begin=f"{glm.KEY}%s{glm.END_KEY}\n{glm.VALUE}",
            end=glm.END_VALUE,
            line_break="",
            after="\n",
            following=(glm.KEY, glm.CLOSE),
        ).make_arguments,
        separator="\n",
        trigger=glm.OPEN,
    ),
    glm.TAGS,
)
GLM47 = ToolFamily(
    "glm47",
    glm.GlmParser,
    CallForm(
        begin=f"{glm.OPEN}%s",
        end=glm.CLOSE,
        make_arguments=TagLayout(
            begin=f"{glm.KEY}%s{glm.END_KEY}{glm.VALUE}",
            end=glm.END_VALUE,
            line_break="",
            after="",
            following=(glm.KEY, glm.CLOSE),
        ).make_arguments,
        separator="",
        trigger=glm.OPEN,
    ),
    glm.TAGS,
)
KIMI_K2 = ToolFamily(
    "kimi_k2",
    kimi.KimiParser,
    CallForm(
        begin=f"{kimi.CALL}{kimi.NAMESPACE}%s:",
        end=kimi.END_CALL,
        make_arguments=make_numbered_arguments,
        separator="",
        opening=kimi.SECTION,
        closing=kimi.END_SECTION,
        trigger=kimi.SECTION,
        forbidden=(kimi.CALL,),
    ),
    kimi.TAGS,
)
OPENAI = ToolFamily(
    "openai",
    harmony.HarmonyParser,
    CallForm(
        begin=(
            f"{harmony.CHANNEL}commentary{harmony.RECIPIENT}{harmony.NAMESPACE}%s "
            f"{harmony.CONSTRAIN}json{harmony.MESSAGE}"
        ),
        # Generation ends at this tag, which no text can contain.
        end="",
        make_arguments=make_json_arguments,
        separator="",
        is_single=True,
        answer=harmony.FINAL,
        add_text=harmony.add_text,
    ),
    harmony.TAGS,
)
PHI4_MINI = ToolFamily(
    "phi4_mini_json",
    phi.PhiParser,
    CallForm(
        begin='{"name": "%s", "arguments": ',
        end="}",
        make_arguments=make_json_arguments,
        separator=", ",
        opening=f"{phi.WORD}[",
        closing="]",
        trigger=phi.WORD,
        forbidden=(phi.OPEN,),
    ),
    (phi.OPEN, phi.CLOSE),
)
# Of templates with the special tokens. The same parser reads both.
_PHI4_TOKENS = PHI4_MINI._replace(
    form=PHI4_MINI.form._replace(
        opening=f"{phi.OPEN}[",
        closing=f"]{phi.CLOSE}",
        trigger=phi.OPEN,
        forbidden=(phi.WORD,),
    )
)


def _make_gemma(name: str, parser: type[gemma.GemmaParser]) -> ToolFamily:
    """Make the family of a model whose calls differ from another's only by their tags."""
    form = CallForm(
        begin=f"{parser.opening}{gemma.WORD}%s",
        end=parser.closing,
        make_arguments=make_delimited_arguments(parser.delimiter),
        separator="",
        trigger=parser.opening,
    )
    return ToolFamily(name, parser, form, (parser.opening, parser.closing, parser.delimiter))


FUNCTIONGEMMA = _make_gemma("functiongemma", gemma.FunctionGemmaParser)
GEMMA4 = _make_gemma("gemma4", gemma.Gemma4Parser)
_FAMILIES = {
    family.name: family
    for family in (
        HERMES,
        QWEN3_CODER,
        LLAMA3_JSON,
        PYTHONIC,
        MISTRAL,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        GLM45,
        GLM47,
        KIMI_K2,
        OPENAI,
        PHI4_MINI,
        FUNCTIONGEMMA,
        GEMMA4,
    )
}
# Names in other servers.
_ALIASES = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "glm": GLM45,
    "gpt-oss": OPENAI,
    "llama3": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "qwen": HERMES,
    "qwen25": HERMES,
    "qwen3_xml": QWEN3_CODER,
}
# Texts by which a condensed template describes or writes its family's calls, most certain first.
# Tags alone are not enough: many families use ``<tool_call>``, and Llama 4's template has the
# tokens of Python calls but asks for JSON.
_MARKS = (
    (GEMMA4, re.compile(re.escape(f"{gemma.Gemma4Parser.opening}{gemma.WORD}"))),
    (FUNCTIONGEMMA, re.compile(re.escape(f"{gemma.FunctionGemmaParser.opening}{gemma.WORD}"))),
    (GLM45, re.compile(re.escape(glm.KEY))),
    (QWEN3_CODER, re.compile(r"<tool_call><function=.*<parameter=")),
    (MISTRAL, re.compile(re.escape(mistral.OPEN))),
    (HERMES, re.compile(r"<tool_call>\{(name|arguments):")),
    (HERMES, re.compile(r"jsonobjectwithfunctionnameandargumentswithin<tool_call>")),
    (PYTHONIC, re.compile(r"\[func_name1\(")),
    (LLAMA3_JSON, re.compile(r"\{name:functionname,parameters:")),
    (PYTHONIC, re.compile(re.escape(pythonic.START))),
    (PHI4_MINI, re.compile(rf"{phi.WORD}\[|{re.escape(phi.CLOSE)}")),
    (OPENAI, re.compile(re.escape(f"{harmony.CHANNEL}commentary"))),
    (KIMI_K2, re.compile(re.escape(kimi.CALL))),
    (DEEPSEEK_V3, re.compile(f"{re.escape(deepseek.SEPARATOR)}.*{deepseek.FENCE}json")),
    (DEEPSEEK_V31, re.compile(re.escape(deepseek.SEPARATOR))),
)
# Texts in templates of unknown families that share tags or phrases with known ones: Seed-OSS,
# Apriel and Hunyuan, MiniMax, Nemotron, LFM2.
_FOREIGN = (
    "<seed:tool_call>",
    "<tool_calls>",
    "<tool_sep>",
    "<invoke name=",
    "<TOOLCALL>",
    "<|tool_call_start|>",
)
# White space, quotes, and places where a template joins texts.
_GLUE = re.compile(r"\{\{-?|-?\}\}|\\n|[\s\"'\\+~]")


@lru_cache(maxsize=64)
def find_tool_family(name: str, template: str) -> ToolFamily | None:
    """Find a family by its name (``--tool-call-parser``).

    For ``auto``, find the family whose calls the chat template describes; None if it is unknown.
    """
    family = _FAMILIES.get(name) or _ALIASES.get(name)
    if name == "auto" and not _is_foreign(template):
        condensed = _GLUE.sub("", template)
        family = next((kind for kind, mark in _MARKS if mark.search(condensed)), None)
        if family is GLM45 and glm.END_KEY + glm.VALUE in template:
            family = GLM47
    if family is MISTRAL and mistral.ARGS in template:
        return _MISTRAL_NAMED
    if family is PHI4_MINI and phi.OPEN in template:
        return _PHI4_TOKENS
    return family


def _is_foreign(template: str) -> bool:
    """Tell whether a template describes calls of an unknown family."""
    # Llama 3.1 and Functionary may write JSON after this tag.
    has_json = qwen_xml.FUNCTION in template and qwen_xml.PARAMETER not in template
    return has_json or any(mark in template for mark in _FOREIGN)
