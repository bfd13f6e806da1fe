"""An offline model gives the device its memory back."""

from __future__ import annotations

import subprocess

import pytest
import torch

from pd import LLM, SamplingParams
from pd.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# What the driver may keep for itself, in bytes.
SLACK = 64 << 20


def list_gpu_processes() -> set[int]:
    """Return the processes with memory on a GPU, as far as the driver names them here."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {int(pid) for pid in listed.split() if pid.isdecimal()}


def test_a_closed_model_leaves_no_process_and_no_memory_on_the_device() -> None:
    torch.cuda.init()
    free, processes = torch.cuda.mem_get_info()[0], list_gpu_processes()
    with LLM(EMBEDDED_MODEL, device="cuda", gpu_memory_utilization=0.3) as llm:
        (output,) = llm.generate("The prefill node", SamplingParams(temperature=0), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16
        assert torch.cuda.mem_get_info()[0] < free - SLACK
    assert torch.cuda.mem_get_info()[0] >= free - SLACK
    assert list_gpu_processes() <= processes
