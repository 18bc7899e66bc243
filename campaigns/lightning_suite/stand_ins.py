"""Take the place of Lightning's ModelParallelStrategy in its own tests, by the same name and arguments.

A user writes ``tensor_parallel_size`` and leaves the number of data-parallel ranks out. These tests leave both out as
well, or say "auto", which means all ranks of a node as tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from megastrategy import fabric, lightning

Size = int | Literal["auto"]


class _BothSizes:
    """``save_distributed_checkpoint`` is not passed on: a tensor-parallel model is saved as one file."""

    tensor_parallel_size: int
    num_processes: int

    def __init__(
        self,
        parallelize_fn: Callable[..., Any] | None = None,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        if parallelize_fn is not None:
            options["parallelize_fn"] = parallelize_fn
        self._asked = tensor_parallel_size
        # what "auto" means is known when there are ranks
        super().__init__(tensor_parallel_size=2 if tensor_parallel_size == "auto" else tensor_parallel_size, **options)

    def setup_environment(self) -> None:
        if self._asked == "auto":
            self.tensor_parallel_size = self.num_processes
        super().setup_environment()  # type: ignore[misc]


class TrainerStrategy(_BothSizes, lightning.MegatronDDPStrategy):
    pass


class FabricStrategy(_BothSizes, fabric.MegatronDDPStrategy):
    pass


class FabricAllReduceStrategy(FabricStrategy):
    """With gradients that every rank has, as the tests read them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, use_distributed_optimizer=False, **options)
