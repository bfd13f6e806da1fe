"""Let a model call a function, and answer with what the function returned.

    python examples/offline/chat_with_tools.py [MODEL]

For vLLM, import StructuredOutputsParams from `vllm.sampling_params` and the rest from `vllm`.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from pd import LLM, SamplingParams, StructuredOutputsParams

EMBEDDED = Path(__file__).parents[2] / "pd" / "assets" / "embedded"
# The small model's own chat template shows no tools, so we put them before it.
TOOLS_TEMPLATE = """{%- if tools -%}
<|im_start|>system
Answer with the name and the arguments of one of these functions as JSON.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
"""


def count_pages(role: str) -> str:
    """The function that the model may call."""
    pages = {"prefill": 512, "decode": 2048}
    return f"A {role} node has {pages[role]} pages."


TOOL = {
    "type": "function",
    "function": {
        "name": "count_pages",
        "description": "How many pages a node of this role has.",
        "parameters": {
            "type": "object",
            "properties": {"role": {"type": "string", "enum": ["prefill", "decode"]}},
            "required": ["role"],
        },
    },
}
# Small models may write something else, so we let them write nothing but a call.
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["count_pages"]},
        "arguments": TOOL["function"]["parameters"],
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def write_tokenizer(directory: str) -> str:
    """Write the small model's tokenizer, with a chat template that shows tools."""
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    config["chat_template"] = TOOLS_TEMPLATE + config["chat_template"]
    Path(directory, "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        if len(sys.argv) > 1:
            llm = LLM(model=sys.argv[1])
        else:
            llm = LLM(model=str(EMBEDDED), tokenizer=write_tokenizer(directory))
    messages = [{"role": "user", "content": "How many pages does a decode node have?"}]
    constraint = StructuredOutputsParams(json=CALL)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=constraint)
    (output,) = llm.chat(messages, params, tools=[TOOL], use_tqdm=False)
    text = output.outputs[0].text
    print("the model calls", text)

    call = json.loads(text)
    result = {"count_pages": count_pages}[call["name"]](**call["arguments"])
    print("the function returns", repr(result))
    messages += [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": result, "tool_call_id": "call-1"},
    ]
    params = SamplingParams(temperature=0, max_tokens=32)
    (output,) = llm.chat(messages, params, tools=[TOOL], use_tqdm=False)
    print("the model answers", repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
