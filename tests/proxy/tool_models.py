"""Directories of models that call tools and reason: a tokenizer, and a chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from proxy_tokenizers import byte_level

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>']
# The way of Qwen 3, without what it says of calls.
QWEN = """
{%- if tools %}<|im_start|>system
Call within <tool_call></tool_call> tags.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- for name, value in call.function.arguments.items() %}[{{ name }}]{% endfor %}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif thinks_at_once is defined %}<think>
{% endif %}{% endif %}"""
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "[INST]{{ m.content }}[/INST]{% endfor %}{# [TOOL_CALLS]name[ARGS] and [THINK] #}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def tokenizer() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens(SPECIAL)
    return made


def write_model(directory: Path, template: str) -> str:
    """The directory, as a proxy's ``tokenizer``."""
    directory.mkdir(exist_ok=True)
    tokenizer().save(str(directory / "tokenizer.json"))
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)
