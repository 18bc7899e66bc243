"""The sections, each a function that is given a context; its letter is the design's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..context import Context
from . import (
    checkpoints,
    compiled,
    environment,
    failures,
    figures,
    frameworks,
    memory,
    model_parallel,
    parity,
    several,
    streams,
    times,
    work,
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the check.

    Attributes:
        about: for ``--help`` and the page.
        run: does it.
        box_s: its time box on GPUs.
        expected_s: on one GPU, by an estimate; a budget goes by it where there are several sections to choose from.
    """

    about: str
    run: Callable[[Context], None]
    box_s: float
    expected_s: float = 30.0


SECTIONS: Mapping[str, Section] = MappingProxyType(
    {
        "A": Section("versions, driver, environment", environment.run, 60, 4),
        "B": Section("one rank equals torch DDP to the bit", parity.run_alone, 180, 36),
        "C": Section("several ranks equal torch DDP, whenever results come", parity.run_several, 300, 105),
        "D": Section("the same over NCCL with two ranks on one GPU", parity.run_nccl_on_one, 240, 3),
        "E": Section("nothing is used that no stream has waited for", parity.run_sanitized, 180, 36),
        "F": Section("a steady step reads nothing back from the device", work.run_waits, 180, 40),
        "G": Section("the device does not idle between backward and step", work.run_idle, 180, 30),
        "H": Section("kernels a step grow with parameters and buckets alone", work.run_launches, 120, 28),
        "I": Section("memory is the table's, and comes back", memory.run, 180, 55),
        "J": Section("step time beside torch DDP and FSDP2", times.run, 300, 100),
        "K": Section("torch.compile and CUDA graphs", compiled.run, 240, 75),
        "L": Section("recurrent layers, whose weights cuDNN wants in one piece", streams.run_recurrent, 90, 16),
        "M": Section(
            "checkpoints: from several ranks to one, in the background, and how fast", checkpoints.run, 180, 55
        ),
        "N": Section("several streams in one model and one loop", streams.run_streams, 180, 27),
        "O": Section('Lightning, Fabric and Accelerate beside "ddp"', frameworks.run, 420, 105),
        "P": Section("a rank fails: the others end soon, with a reason", failures.run, 300, 45),
        "Q": Section("several GPUs: bandwidth by size and alignment, and what is hidden", several.run_links, 300, 60),
        "R": Section("several GPUs: what might wait for ever", several.run_hazards, 120, 60),
        "S": Section("first look: GPT of 124M and 1.3B beside torch DDP and FSDP2", figures.run, 300, 120),
        "T": Section("tensor parallel layers, pipelines and experts beside one process", model_parallel.run, 90, 20),
    }
)
"""In the order of their letters; a run without ``--only`` does all."""
