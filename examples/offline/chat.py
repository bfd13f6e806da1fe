"""Answer a conversation, and then a batch of them.

    python examples/offline/chat.py [MODEL]

For vLLM, change `pd` in the import to `vllm`.
"""

import sys
from pathlib import Path

from pd import LLM, SamplingParams

EMBEDDED = Path(__file__).parents[2] / "pd" / "assets" / "embedded"
QUESTIONS = [
    "What is the KV cache?",
    "What does the prefill node do?",
    "Who sends the first token?",
    "What is a unified node?",
]


def main() -> None:
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else str(EMBEDDED), seed=0)
    params = SamplingParams(temperature=0, max_tokens=64)

    conversation = [{"role": "user", "content": QUESTIONS[0]}]
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    answer = output.outputs[0].text
    print(f"{QUESTIONS[0]}\n  {answer}\n")

    # The next question comes with what was said before.
    conversation += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "How does the KV cache get to the decode node?"},
    ]
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    print(f"{conversation[-1]['content']}\n  {output.outputs[0].text}\n")

    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, params, use_tqdm=True)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}\n  {output.outputs[0].text}")


if __name__ == "__main__":
    main()
