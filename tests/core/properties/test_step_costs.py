"""Ceilings for the host's work in a step, which no machine's load changes: ``python -m benchmarks.step_costs``.

A change may lower a ceiling. A commit that raises one says why.
"""

import json
import subprocess
import sys

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


PATH = """
import sys, torch
from benchmarks.step_costs import ReadyGradients, make_gpt, one_rank_of_eight
from megastrategy import DistributedDataParallel, DistributedOptimizer
codes = set()
def trace(frame, event, argument):
    codes.add(frame.f_code)
with one_rank_of_eight():
    module = ReadyGradients(make_gpt(12, torch.float32))
    sys.setprofile(trace)
    model = DistributedDataParallel(module)
    sys.setprofile(None)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    sys.setprofile(trace)
    for _ in range(3):
        model().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
for code in codes:
    folder, _, file = code.co_filename.partition("/megastrategy/core/")
    if file:
        print(file, code.co_qualname)
"""
OF_THE_PATH = ("data_path/", "optimizer/", "distributed_")
"""Below ``core``, the folders and faces of the path; what else runs is imported."""


def test_a_gradient_passes_few_classes() -> None:
    """From the wrap of a model to the gather of new weights, with the default options."""
    printed = subprocess.run([sys.executable, "-c", PATH], check=True, capture_output=True, text=True).stdout
    functions = [tuple(line.split(" ", 1)) for line in printed.splitlines()]
    functions = [(file, name) for file, name in functions if not file.startswith("judge/")]  # the optimizer's judge
    classes = {(file, name.split(".")[0]) for file, name in functions if name.lstrip("_")[0].isupper()}
    own = {(file, name) for file, name in classes if file.startswith(OF_THE_PATH)}
    assert ("data_path/bucket.py", "Bucket") in own
    assert len(own) <= 15, sorted(own)
    assert len(classes - own) <= 20, sorted(classes - own)
    files = {file for file, _ in functions if file.startswith(OF_THE_PATH)}
    assert len(files) <= 20, sorted(files)
