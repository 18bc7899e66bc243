"""The tensors that an object of the engine refers to, for tests that compare their bytes with a formula."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn


def tensors_in(buffers: object) -> list[Tensor]:
    """Returns the tensors in the lists of an object, and in the dataclasses in these lists; no parameters."""
    items = [item for values in vars(buffers).values() if isinstance(values, list) for item in values]
    records = [item for item in items if dataclasses.is_dataclass(item)]
    items += [value for record in records for value in vars(record).values()]
    return [item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)]
