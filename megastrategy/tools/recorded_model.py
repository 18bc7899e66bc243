"""Keeps beside a model's events what another number of ranks, link or bucket size is simulated from."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core import DistributedDataParallel, DistributedDataParallelConfig, ParamSpec
from .planned_layout import expert_domain


@dataclasses.dataclass(frozen=True)
class RecordedModel:
    """A wrapped model, as one rank had it.

    Attributes:
        params: its trainable parameters in order of registration.
        config: its options.
        dp_size: ranks that it was on.
        device_type: torch's name of the kind of device.
        host, cores, num_threads: this process's machine, the cores that it may run on, and torch's threads.
        cpu_ns: by event, processor time until then, of the thread that told it and of the process.
        ready: gradients as they arrived: parameter, time, and processor time of the thread, in nanoseconds.
    """

    params: Sequence[ParamSpec]
    config: DistributedDataParallelConfig
    dp_size: int
    device_type: str
    host: str
    cores: Sequence[int]
    num_threads: int
    cpu_ns: Sequence[tuple[int, int]] = ()
    ready: Sequence[tuple[int, int, int]] = ()

    @staticmethod
    def of(model: DistributedDataParallel) -> RecordedModel:
        """Describes ``model`` in this process."""
        layout = model.layout
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return RecordedModel(
            layout.params,
            model.engine.config,
            layout.dp_size,
            model.device.type,
            platform.node(),
            list(cores),
            torch.get_num_threads(),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain types."""
        params = [
            {
                "name": spec.name,
                "shape": spec.shape,
                "stride": spec.stride,
                "dtype": str(spec.dtype).removeprefix("torch."),
                "grad_dtype": str(spec.grad_dtype).removeprefix("torch."),
                "room": spec.reserved_numel,
                "expert_ranks": 1 if spec.domain is None else len(spec.domain.groups),
            }
            for spec in self.params
        ]
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "params": params, "config": dataclasses.asdict(self.config)}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RecordedModel:
        """Reads what :meth:`to_json` wrote. Weights that were one chunk of memory are no longer."""
        config, dp_size = DistributedDataParallelConfig(**content["config"]), content["dp_size"]
        params = [
            ParamSpec(
                spec["name"],
                tuple(spec["shape"]),
                tuple(spec["stride"]),
                getattr(torch, spec["dtype"]),
                getattr(torch, spec["grad_dtype"]),
                reserved_numel=spec.get("room", 0),  # files of before 2026-11-25 have none
                domain=expert_domain(config, dp_size, ranks) if (ranks := spec.get("expert_ranks", 1)) > 1 else None,
            )
            for spec in content["params"]
        ]
        own = {
            "params": params,
            "config": config,
            "cpu_ns": [tuple(times) for times in content["cpu_ns"]],
            "ready": [tuple(times) for times in content["ready"]],
        }
        return RecordedModel(**{**content, **own})
