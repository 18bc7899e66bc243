"""Keeps autograd's AccumulateGrad nodes of all parameters.

[Note: one stream for all gradients]
An AccumulateGrad node runs on the stream that was current when it was created, and so does the parameter's hook.
autograd creates it at the parameter's first use in a forward, and drops it with the graph. In a model with a branch on
a stream of its own the hooks would then run on two streams. The first hook zeroes the buffers, and the last one of a
bucket launches its reduction. Neither waits for additions on the other stream: a race, with wrong gradients and no
error. If the nodes are kept from the start, as in torch DDP and Megatron-LM, all are on one stream, and autograd makes
that stream wait for the gradients. Memory that a hook allocates is then also freed on the stream that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from .. import devices


class GradAccumulators:
    """The AccumulateGrad nodes of one reducer's parameters; see [Note: one stream for all gradients].

    Nodes refer to their parameters, and parameters do not refer to their nodes, so there is no cycle.
    """

    def __init__(self) -> None:
        self._params: list[Parameter] = []
        self._nodes: list[Any] = []  # in torch's stubs Node.metadata, a dict, is a method
        self._frozen: list[Parameter] = []  # without a node, since they require no gradient
        self._stream: Any = None
        # Read once: with overlap_param_gather=True a read of a parameter waits for its gather.
        self._device = torch.device("cpu")

    def extend(self, params: Sequence[Parameter]) -> None:
        """Adds the nodes of more parameters, on the stream of the present nodes."""
        if not params:
            return
        if not self._params:
            self._device = params[0].device
            self._stream = devices.current_stream(self._device)
        self._params += params
        self._add(params)

    def update_stream(self) -> None:
        """Adds nodes of unfrozen parameters; creates all anew if the loop has changed to another stream, for which
        hooks would wait."""
        if self._frozen:
            frozen = self._frozen
            self._frozen = []
            self._add(frozen)
        # The host has no streams.
        if not self._params or devices.is_on_host(self._device):
            return
        before = self._stream
        now = devices.current_stream(self._device)
        if now == before:
            return
        self._mark(stale := object())
        self._recreate(now)
        # A graph that is still alive (user code keeps a loss) keeps its nodes, on the old stream. Nodes on two streams
        # are the race, so all stay on the old stream until the next forward.
        if any(node.metadata.get(_MARK) is stale for node in self._nodes):
            self._recreate(before)

    def drop(self) -> None:
        """Drops all nodes and parameters."""
        self._params = []
        self._nodes = []
        self._frozen = []
        self._stream = None

    def _mark(self, mark: object) -> None:
        # Not in the caller, where the loop's variable would keep the last node alive.
        for node in self._nodes:
            node.metadata[_MARK] = mark

    def _recreate(self, stream: Any) -> None:
        # Dropped first: autograd creates no second node while the first is alive.
        self._nodes = []
        self._frozen = []
        self._stream = stream
        self._add(self._params)

    def _add(self, params: Iterable[Parameter]) -> None:
        # A module may be wrapped inside inference_mode, where autograd returns no node.
        with torch.inference_mode(False), devices.on_stream(self._stream, self._device):
            for param in params:
                if param.requires_grad:
                    self._nodes.append(get_gradient_edge(param).node)
                else:
                    self._frozen.append(param)


_MARK = "megastrategy"
"""The key in a node's metadata, which exists as long as the node itself."""
