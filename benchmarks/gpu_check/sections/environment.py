"""A: what is checked, and on what."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from typing import Any

import torch

from ..context import Context
from ..ranks import Rank
from ..versions import KNOWN_TORCH, has_numpy, nccl_version, torch_release

_NAMED = re.compile(r"^(NCCL|GLOO|TORCH|PYTORCH|CUDA|CUBLAS|MEGATRON_DDP|LD_PRELOAD|OMP)")


def run(context: Context) -> None:
    """The whole section."""
    [found] = context.ranks(look, place=context.place("alone"))
    for name, value in found.items():
        context.measure(name, value)
    first, last = KNOWN_TORCH
    release = torch_release()
    known = "" if first <= release <= last else f"written for torch {first} to {last}; others were not tried"
    context.check_equal("torch-is-known", ".".join(map(str, release)), known)
    for name in sorted(name for name in os.environ if _NAMED.match(name)):
        context.measure(f"environment.{name}", os.environ[name] or '""')
    if context.is_host:
        context.skip("driver", "there is no GPU in this run")
    elif shutil.which("nvidia-smi") is None:
        context.skip("driver", "nvidia-smi is not there (a ROCm machine, or a container without it)")
    else:
        context.measure("driver", _driver())


def look(rank: Rank) -> dict[str, Any]:
    """On a rank that has the device: its versions, and whether it adds, sleeps and multiplies."""
    device, found = rank.device, {"torch": torch.__version__, "python": platform.python_version()}
    found["numpy"] = importlib.metadata.version("numpy") if has_numpy() else "not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device.index)
        found |= {
            "device": properties.name,
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "toolkit": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}",
            "nccl": ".".join(map(str, nccl_version())),
            "allocator": torch.cuda.get_allocator_backend(),
        }
    else:
        found |= {"device": platform.processor() or platform.machine(), "cores": str(os.cpu_count())}
    device.sleep(1.0)  # the first one finds out how long a GPU's cycle is
    first = device.mark()
    device.sleep(20.0)
    found["sleep-of-20-ms"] = f"{device.ms_between(first, device.mark()):.1f} ms"
    a = torch.arange(64.0, device=device.torch_device).view(8, 8)
    if float((a @ torch.eye(8, device=device.torch_device) - a).abs().max()) != 0.0:
        raise RuntimeError("a matrix times the identity is another one")
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version,name,memory.used", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().replace("\n", "; ") or done.stderr.strip()[:200]
