"""Says which optimizer steps which parameters, for a case; an engine makes them as it needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .cases import LanguageModel
from .peers import LR


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Parameters, and the optimizer that steps them."""

    params: list[nn.Parameter]
    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def make(self) -> torch.optim.Optimizer:
        return self.kind(self.params, **self.options)

    def share(self, rank: int, size: int) -> Part:
        """About 1/size of it, in whole parameters; the largest go first, each to the share that has the least."""
        shares: list[list[nn.Parameter]] = [[] for _ in range(size)]
        for param in sorted(self.params, key=lambda param: -param.numel()):
            min(shares, key=lambda share: sum(other.numel() for other in share)).append(param)
        return dataclasses.replace(self, params=shares[rank])


def _adamw(module: LanguageModel, adamw: Mapping[str, Any]) -> list[Part]:
    return [Part(list(module.parameters()), torch.optim.AdamW, {"lr": LR, **adamw})]


def _muon(module: LanguageModel, adamw: Mapping[str, Any]) -> list[Part]:
    """torch's documentation has it so: Muon for the matrices of the hidden layers, AdamW for all else.

    Muon is stepped last: what it has stepped, which is most, may be gathered under the next forward. It takes AdamW's
    learning rate, as ``adjust_lr_fn="match_rms_adamw"`` is for.
    """
    matrices = [param for param in module.blocks.parameters() if param.ndim == 2]
    ids = {id(param) for param in matrices}
    rest = [param for param in module.parameters() if id(param) not in ids]
    return [
        Part(rest, torch.optim.AdamW, {"lr": LR, **adamw}),
        Part(matrices, torch.optim.Muon, {"lr": LR, "adjust_lr_fn": "match_rms_adamw"}),
    ]


RECIPES: Mapping[str, Callable[[LanguageModel, Mapping[str, Any]], list[Part]]] = MappingProxyType(
    {"adamw": _adamw, "muon": _muon}
)
"""By name, a function of the model, as the engine has wrapped it, and of AdamW's arguments. No parameter is in two."""
