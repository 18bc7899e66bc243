"""The replicas of an Accelerator: what they refuse and save, and what one that comes back takes over.

[Note: an Accelerator is a replica's]
Everything of an Accelerator is that of one replica: ``num_processes``, ``is_main_process``, ``gather``, ``reduce``.
So a loader or a schedule that it prepares would train as in a world without the others, and is refused.
``is_main_process`` is true in each replica: scripts read it before there is a leader, to open a tracker for example,
and the leader changes.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OPTION = "MegatronDDPPlugin(replicas=...)"


class AcceleratorReplicas:
    """The replicas of one Accelerator, or none.

    Args:
        accelerator: with its plugin.

    Attributes:
        replicas: those of the plugin; None for one job.

    Raises:
        ValueError: for a ``ParallelismConfig``.
    """

    def __init__(self, accelerator: Any) -> None:
        self.replicas = accelerator.megatron_ddp_plugin.replicas
        self._accelerator = weakref.ref(accelerator)
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._step_before = 0
        if self.replicas is not None and accelerator.parallelism_config is not None:
            raise ValueError(
                f"{_OPTION} and a ParallelismConfig are not supported together: leave one of them "
                "out (parallelism_config=, or PARALLELISM_CONFIG_... in the environment)"
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def add_accelerator(self) -> None:
        """Adds the Accelerator's counters and its scaler to the state that a replica takes over."""
        accelerator = self._accelerator()
        if self.replicas is None or accelerator is None:
            return
        configuration = accelerator.project_configuration

        def get() -> tuple[int, int]:
            self._step_before = accelerator.step - 1  # accumulate() has counted the present batch
            return self._step_before, configuration.iteration

        def put(counters: tuple[int, int]) -> None:
            # Of one that comes back the batches of its first step count as those of the others' step.
            is_counted = self.replicas.healed and not self.replicas.dropped
            num_batches = accelerator.step - self._step_before if is_counted else 0
            accelerator.step = counters[0] + num_batches
            configuration.iteration = counters[1]

        self.replicas.register("accelerator", get, put)
        if accelerator.scaler is not None:
            self.add("scaler", accelerator.scaler)

    def add(self, kind: str, *objects: Any) -> None:
        """Lets a replica that comes back take over the state of these objects, which it finds by their order."""
        for one in objects if self.replicas is not None else ():
            self.replicas.register(f"{kind} {next(self._numbers[kind])}", one.state_dict, one.load_state_dict)

    # --- what users divide and step themselves -----------------------------------------------------------------------

    def refuse(self, call: str, way_out: str) -> None:
        """Raises ValueError if there are replicas, whose number ``call`` would leave out."""
        if self.replicas is not None:
            raise ValueError(f"{_OPTION} and {call}, which knows the processes of one replica only: {way_out}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def writes_in(self, call: str) -> bool:
        """Returns whether this replica writes the files of a call. Raises ValueError before the first batch, when there
        is no leader yet."""
        return self.replicas is None or self.replicas.writes_in(call)

    def skip_save(self, output_dir: str | None) -> Path:
        """Returns the folder in which the leader saves a state, and counts it."""
        accelerator = self._accelerator()
        assert accelerator is not None, "it saves"
        configuration = accelerator.project_configuration
        if not configuration.automatic_checkpoint_naming:
            return Path(str(output_dir))
        configuration.iteration += 1
        return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{configuration.iteration - 1}")

    def close(self) -> None:
        """Leaves the other replicas, if there are any."""
        if self.replicas is not None:
            self.replicas.close()
