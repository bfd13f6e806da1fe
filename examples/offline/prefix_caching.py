"""Ask several questions about one long text, which is computed only once.

    python examples/offline/prefix_caching.py [MODEL]

For vLLM, change `pd` in the import to `vllm`.
"""

import sys
import time
from pathlib import Path

from pd import LLM, SamplingParams

EMBEDDED = Path(__file__).parents[2] / "pd" / "assets" / "embedded"
ROLES = ["prefill", "decode", "unified"]


def make_table(rows: int) -> str:
    """Make a table of nodes."""
    lines = ["| node | role | pages |", "|---|---|---|"]
    lines += [f"| {n} | {ROLES[n % 3]} | {1024 + 64 * (n % 7)} |" for n in range(rows)]
    return "The nodes of a deployment:\n\n" + "\n".join(lines) + "\n\n"


def main() -> None:
    llm = LLM(
        model=sys.argv[1] if len(sys.argv) > 1 else str(EMBEDDED),
        enable_prefix_caching=True,
    )
    table = make_table(80)
    params = SamplingParams(temperature=0, max_tokens=16)
    llm.generate("Hello", params, use_tqdm=False)  # what is new takes longer
    for node in (7, 42, 61):
        began = time.perf_counter()
        (output,) = llm.generate(f"{table}The role of node {node} is", params, use_tqdm=False)
        seconds = time.perf_counter() - began
        print(
            f"node {node}: {len(output.prompt_token_ids)} prompt tokens, "
            f"{output.num_cached_tokens} of them cached, {1000 * seconds:.0f} ms, "
            f"{output.outputs[0].text!r}"
        )


if __name__ == "__main__":
    main()
