"""Two hosts whose names and interfaces are as people have them: it starts wherever "ddp" starts. In the long tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support.patience import HANG_S
from ..support.scripts import ROOT

pytestmark = [pytest.mark.long, pytest.mark.fresh, pytest.mark.timeout(1800)]

CANNOT_BE_HAD = 75

SCRIPT = """
import json
import os
import sys
import time
import traceback
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import megastrategy


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


strategy, folder = sys.argv[1:]
host = os.environ["HOST"]
os.environ |= {"MASTER_ADDR": os.environ["FIRST"], "MASTER_PORT": "29511", "NODE_RANK": host, "LOCAL_RANK": "0"}
model = Model()
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=1, num_nodes=2, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
began_at, found = time.monotonic(), {}
try:
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)))))
    found["weights"] = [param.tolist() for param in model.parameters()]
except RuntimeError as error:
    found["error"] = "".join(traceback.format_exception_only(error))
    raise
finally:
    found["seconds"] = time.monotonic() - began_at
    with open(f"{folder}/{strategy}-{host}.json", "w") as file:
        json.dump(found, file)
"""


def started(kind: str, strategy: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What came of it on the hosts that ended: weights, or an error; and how long it took."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GLOO_")} | variables
    ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    hosts = ROOT / "tests" / "many_machines" / "hosts.sh"
    command = [hosts, kind, sys.executable, script, strategy, folder]
    done = subprocess.run(command, env=ours, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(f"no hosts can be had here (root, unshare, iproute2): {done.stderr.strip()}")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert found, done.stdout + done.stderr
    assert (done.returncode == 0) == all("weights" in one for one in found), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("kind", ["names", "debian", "dead-end", "ipv6"])
def test_it_starts_where_ddp_starts_and_says_what_to_do_where_not(tmp_path: Path, kind: str) -> None:
    ddp = started(kind, "ddp", tmp_path / "ddp")
    ours = started(kind, "megatron_ddp", tmp_path / "ours")
    if kind in ("names", "ipv6"):
        assert [one["weights"] for one in ours] == [one["weights"] for one in ddp]
        assert len(ours) == 2
        return
    for one in ddp:
        assert "Gloo connectFullMesh failed" in one["error"]
    for one in ours:
        *_, note = one["error"].strip().splitlines()
        assert note.startswith("gloo listens where the machine's name leads to, and host")
        assert "Set GLOO_SOCKET_IFNAME on every machine to an interface that the others reach" in note
        assert "eth0 (10.77.0." in note
        assert one["seconds"] < 30
    # and what it says helps
    told = started(kind, "megatron_ddp", tmp_path / "told", GLOO_SOCKET_IFNAME="eth0")
    like_others = started("names", "ddp", tmp_path / "names")
    assert [one["weights"] for one in told] == [one["weights"] for one in like_others]
