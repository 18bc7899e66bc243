"""The buffers of a loss module, which only the last stage updates: centers of classes, running statistics, counters.

Every stage has the module, and the lowest rank saves its state. So the last stage sends its buffers to the other stages
at the end of each batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


class LossBuffers:
    """The buffers of a pipeline's loss before a batch; none if the loss is a function."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._kinds = self._found()

    def problem(self) -> str:
        """Returns the reason why the buffers cannot be sent to the other stages; empty if they can."""
        found = self._found()
        if found == self._kinds:
            return ""
        name = next(name for name in {**self._kinds, **found} if self._kinds.get(name) != found.get(name))
        return (
            f"buffer {name!r} of the pipeline's loss is {_described(found.get(name))} after a batch, and was "
            f"{_described(self._kinds.get(name))} before: the other stages, which have it too, need one shape and dtype"
        )

    def share(self, group: ProcessGroup | None, last: int) -> None:
        """Broadcasts the buffers of rank ``last`` to all ranks of the stages. Collective if there are any."""
        if not self._kinds:
            return
        buffers = [buffer for _, buffer in self._loss.named_buffers()]
        sent = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
        dist.broadcast(sent, group=group, group_src=last)
        if dist.get_rank(group) == last:
            return
        with torch.no_grad():
            for buffer, part in zip(buffers, sent.split([buffer.nbytes for buffer in buffers]), strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _found(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        named = self._loss.named_buffers() if isinstance(self._loss, nn.Module) else ()
        return {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in named}


def _described(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if kind is None else f"{list(kind[0])} of {str(kind[1]).removeprefix('torch.')}"
