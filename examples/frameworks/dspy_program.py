"""A program of DSPy on pd, with nothing of ours in between.

pip install dspy
python dspy_program.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

import dspy


class Extract(dspy.Signature):
    """Extract the fields of a person from a sentence."""

    sentence: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


# The embedded model knows no format of prompts but its own. A schema makes it obey.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def main(url: str) -> None:
    model = dspy.LM(
        "openai/embedded", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=96
    )
    dspy.configure(lm=model.copy(response_format=FORMAT), adapter=dspy.JSONAdapter())
    extract = dspy.Predict(Extract)
    found = extract(sentence="Anna Berg is a nurse from Oslo and is 33 years old.")
    print(f"name={found.name!r} age={found.age!r}")
    (answer,) = model("What is the KV cache?")
    print(answer)


if __name__ == "__main__":
    main(sys.argv[1])
