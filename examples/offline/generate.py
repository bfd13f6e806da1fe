"""Complete a few prompts.

Run it with a checkpoint or without, for the small model that comes with pd:

    python examples/offline/generate.py [MODEL]

For vLLM, change `pd` in the import to `vllm`.
"""

import sys
from pathlib import Path

from pd import LLM, SamplingParams

EMBEDDED = Path(__file__).parents[2] / "pd" / "assets" / "embedded"
QUESTIONS = [
    "What does the prefill node do?",
    "What does the decode node do?",
    "What does the proxy do?",
    "What is the KV cache?",
]
# The small model learned questions and answers in this form.
PROMPTS = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else str(EMBEDDED), seed=0)
    params = SamplingParams(temperature=0.3, top_p=0.95, max_tokens=48)
    outputs = llm.generate(PROMPTS, params)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}\n  {output.outputs[0].text}")


if __name__ == "__main__":
    main()
