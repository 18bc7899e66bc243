"""The replicas of an Accelerator: what they refuse and save, and what one that comes back takes over.

[Note: an Accelerator is a replica's]
Everything of an Accelerator is that of one replica: ``num_processes``, ``is_main_process``, ``gather``, ``reduce``.
So a loader or a schedule that it prepares would train as in a world without the others, and is refused.
``is_main_process`` is true in each replica: scripts read it before there is a leader, to open a tracker for example,
and the leader changes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class AcceleratorReplicas:
    """The replicas of one Accelerator, or none.

    Attributes:
        replicas: those of the plugin; None for one job.

    Raises:
        ValueError: for options of the Accelerator that know the processes of one replica only.
    """

    def __init__(self, accelerator: Any) -> None:
        self.replicas = accelerator.megatron_ddp_plugin.replicas
        self._numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
        if accelerator.parallelism_config is not None:
            self.refuse("a ParallelismConfig", "leave one of them out (PARALLELISM_CONFIG_... in the environment, too)")
        if accelerator.project_configuration.automatic_checkpoint_naming:
            self.refuse("automatic_checkpoint_naming", "pass a folder to save_state()")

    @property
    def writes(self) -> bool:
        """Whether this replica writes the files of a call that all make."""
        return self.replicas is None or self.replicas.writes

    def add(self, kind: str, *objects: Any) -> None:
        """Lets a replica that comes back take over the state of these objects, which it finds by their order."""
        for one in objects if self.replicas is not None else ():
            self.replicas.register(f"{kind} {next(self._numbers[kind])}", one.state_dict, one.load_state_dict)

    def refuse(self, call: str, way_out: str) -> None:
        """Raises ValueError if there are replicas, whose number ``call`` would leave out."""
        if self.replicas is not None:
            raise ValueError(
                f"MegatronDDPPlugin(replicas=...) and {call}, which knows one replica's processes only: {way_out}"
            )

    def close(self) -> None:
        """Leaves the other replicas, if there are any."""
        if self.replicas is not None:
            self.replicas.close()
