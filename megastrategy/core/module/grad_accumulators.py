"""Keeps the nodes of autograd's graph that accumulate the parameters' gradients.

[Note: one stream for all gradients]
Such a node (AccumulateGrad) runs on the stream that was current when it was made, and so does the parameter's hook.
autograd makes it at the parameter's first use in a forward, and drops it with the graph. In a model with a branch on a
stream of its own the hooks would then run on two streams. The first hook zeroes the buffers, the last one of a bucket
launches its reduction, and neither waits for what the other stream is adding: a race, and wrong gradients without a
word. Kept from the start on, as torch DDP and Megatron-LM keep them, all nodes are on one stream, and autograd itself
makes that stream wait for whatever computed a gradient. Memory that is allocated in a hook is then also freed behind
the work of the stream that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from .. import devices


class GradAccumulators:
    """Holds the node of every parameter, all made on one stream; see [Note: one stream for all gradients].

    Belongs to one reducer. Nodes hold their parameters, and parameters do not hold their nodes: no cycle arises.
    """

    def __init__(self) -> None:
        self._params: list[Parameter] = []
        self._nodes: list[Any] = []  # torch's own types take Node.metadata, a dict, for a method
        self._frozen: list[Parameter] = []  # without a node: autograd gives none to what requires no gradient
        self._stream: Any = None
        # Read once: with overlap_param_gather="forward" reading a parameter waits for its gather.
        self._device = torch.device("cpu")

    def extend(self, params: Sequence[Parameter]) -> None:
        """Takes the nodes of more parameters, on the stream of those known so far."""
        if not params:
            return
        if not self._params:
            self._device = params[0].device
            self._stream = devices.current_stream(self._device)
        self._params += params
        self._take(params)

    def take_unfrozen(self) -> None:
        """Takes the nodes of what was frozen before and is not now."""
        if self._frozen:
            frozen, self._frozen = self._frozen, []
            self._take(frozen)

    def follow_stream(self) -> None:
        """Takes the nodes anew where the loop has gone over to another stream, which hooks would else have to join."""
        self.take_unfrozen()
        # The host has no streams, and no forward there pays for the question.
        if not self._params or devices.is_on_host(self._device):
            return
        before, now = self._stream, devices.current_stream(self._device)
        if now == before:
            return
        self._mark(stale := object())
        self._retake(now)
        # A graph that is still alive (a loss that user code keeps) holds its nodes: those come back with their stream.
        # Nodes of two streams are the race itself, so all stay on the old one until the next forward.
        if any(node.metadata.get(_MARK) is stale for node in self._nodes):
            self._retake(before)

    def retake(self) -> None:
        """Takes the nodes anew, since some are of tensors that are in no parameter any more."""
        self._retake(self._stream)

    def drop(self) -> None:
        """Lets go of all nodes and parameters."""
        self._params, self._nodes, self._frozen, self._stream = [], [], [], None

    def _mark(self, mark: object) -> None:
        for node in self._nodes:
            node.metadata[_MARK] = mark

    def _retake(self, stream: Any) -> None:
        # Dropped first: autograd makes no second node while the first is alive.
        self._nodes, self._frozen, self._stream = [], [], stream
        self._take(self._params)

    def _take(self, params: Iterable[Parameter]) -> None:
        # inference_mode: a module may be wrapped inside it, where autograd would give out no node.
        with torch.inference_mode(False), devices.on_stream(self._stream, self._device):
            for param in params:
                if param.requires_grad:
                    self._nodes.append(get_gradient_edge(param).node)
                else:
                    self._frozen.append(param)


_MARK = "megastrategy"
"""The key in a node's metadata, which lives as long as autograd's node."""
