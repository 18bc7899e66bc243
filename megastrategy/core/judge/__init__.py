"""Which optimizers may be sharded: copies of them step small tensors, some of them with poisoned gradients.

``GroupClasses`` decides for each group: one whose update is element-wise is stepped as flat shards, one that steps each
parameter by itself as whole parameters by their owners; any other one is refused.
"""

from .classification import Sharding, sharding_of
from .element_state import describe_undividable, is_per_element
from .group_classes import GroupClasses
from .identity import check_main_param_steps
from .values import NotClassifiedError

__all__ = [
    "GroupClasses",
    "NotClassifiedError",
    "Sharding",
    "check_main_param_steps",
    "describe_undividable",
    "is_per_element",
    "sharding_of",
]
