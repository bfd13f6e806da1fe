"""Constrain answers: to a choice, a regular expression, a JSON schema and a grammar.

    python examples/offline/structured_outputs.py [MODEL]

For vLLM, import StructuredOutputsParams from `vllm.sampling_params` and the rest from `vllm`.
"""

import json
import sys
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, Field

from pd import LLM, SamplingParams, StructuredOutputsParams

EMBEDDED = Path(__file__).parents[2] / "pd" / "assets" / "embedded"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"


class NodeReport(BaseModel):
    role: Role
    page_size: int = Field(ge=1, le=64)
    is_ready: bool


GRAMMAR = """
root ::= "SELECT " column " FROM " table " WHERE " condition
column ::= "role" | "pages"
table ::= "nodes" | "requests"
condition ::= column " = " [0-9]
"""

TASKS = {
    "choice": (
        "Does the prefill node compute the prompt? Answer:",
        StructuredOutputsParams(choice=["yes", "no"]),
    ),
    "regex": (
        "The address of a decode node is",
        StructuredOutputsParams(regex=r" http://[a-z]{3,8}\.example:3[0-9]{4}"),
    ),
    "json": (
        "A report about a node: ",
        StructuredOutputsParams(json=NodeReport.model_json_schema()),
    ),
    "grammar": (
        "The query for the free pages of a node: ",
        StructuredOutputsParams(grammar=GRAMMAR),
    ),
}


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else str(EMBEDDED), max_model_len=1024)
    prompts = [prompt for prompt, _ in TASKS.values()]
    params = [
        SamplingParams(temperature=0, max_tokens=80, structured_outputs=constraint)
        for _, constraint in TASKS.values()
    ]
    texts = {}
    for name, output in zip(TASKS, llm.generate(prompts, params), strict=True):
        texts[name] = output.outputs[0].text
        print(f"{name:8} {texts[name]!r}")
    print("the report, read:", NodeReport(**json.loads(texts["json"])))


if __name__ == "__main__":
    main()
