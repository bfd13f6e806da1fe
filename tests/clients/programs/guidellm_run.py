"""A short run of GuideLLM over chats and completions: `python guidellm_run.py URL MODEL_DIRECTORY`.

It draws its prompts by the tokenizer in the model's directory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REQUESTS = 6


def run(url: str, model: str, path: str) -> None:
    report = Path(f"{path.strip('/').replace('/', '-')}.json")
    program = Path(sys.executable).parent / "guidellm"
    ended = subprocess.run(
        [
            str(program),
            "run",
            *("--backend", f"kind=openai_http,target={url},model=embedded,request_format={path}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={model}"),
            *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
            "--disable-console-interactive",
        ],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == 8, request


def main(url: str, model: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        run(url, model, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
