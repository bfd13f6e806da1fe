"""The embedded model with a chat template that shows tools and calls, so agents can use it.

The model was never trained on calls. A forced call is one all the same, because a grammar forces
it; without tools it answers as ever.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from pd.embedded import EMBEDDED_MODEL

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
Call functions within <tool_call></tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def write_calling_model(directory: Path) -> Path:
    """Write the model to ``directory``, with links to its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in EMBEDDED_MODEL.iterdir():
        os.symlink(file, directory / file.name)
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").unlink()
    written = json.dumps(config | {"chat_template": TEMPLATE})
    (directory / "tokenizer_config.json").write_text(written)
    return directory
