"""Ceilings for the host's work in a step, which no machine's load changes: ``python -m benchmarks.step_costs``.

A change may lower a ceiling. A commit that raises one says why.
"""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.step_costs import Bytecodes

COUNT = """
import json, torch
from benchmarks.step_costs import ENGINES, ReadyGradients, bytecodes, make_gpt, one_rank_of_eight, operators
with one_rank_of_eight():
    counts = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = ENGINES["ours"](ReadyGradients(make_gpt(12, dtype)), 8)
        counts[str(dtype)] = {
            "bytecodes": bytecodes(engine).total,
            "operators": operators("ours", dtype).total - operators("alone", dtype).total,
            "operators with clipping": operators("ours", dtype, clips=True).total - operators("alone", dtype).total,
        }
print(json.dumps(counts))
"""
NUM_PARAMS, NUM_BUCKETS = 148, 8
BYTECODES = 35 * NUM_PARAMS + 700 * NUM_BUCKETS + 7_000
OPERATORS = 4 * NUM_BUCKETS + 3
"""Beyond those of the model and one fused AdamW."""
CEILINGS = {
    "torch.float32": {
        "bytecodes": BYTECODES,
        "operators": OPERATORS,
        "operators with clipping": OPERATORS + 13,
    },
    "torch.bfloat16": {
        "bytecodes": BYTECODES,
        "operators": OPERATORS + 5,
        "operators with clipping": OPERATORS + 5 + 13,
    },
}


@pytest.mark.fresh
def test_step_costs_stay_below_their_ceilings() -> None:
    command = [sys.executable, "-c", COUNT]
    counts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert counts.keys() == CEILINGS.keys()
    over = {
        (dtype, name): (count, CEILINGS[dtype][name])
        for dtype, by_name in counts.items()
        for name, count in by_name.items()
        if count > CEILINGS[dtype][name]
    }
    assert not over, over


def test_bytecodes_are_counted_in_called_functions_and_hooks() -> None:
    weight = torch.ones(1, requires_grad=True)

    def run() -> int:
        with Bytecodes() as counted:
            (weight * 2).backward()
        return counted.total

    run()
    without_hook = run()
    assert run() == without_hook
    weight.register_post_accumulate_grad_hook(lambda param: None)
    with_hook = run()
    weight.register_post_accumulate_grad_hook(lambda param: None)
    assert with_hook > without_hook
    assert run() - with_hook == with_hook - without_hook
