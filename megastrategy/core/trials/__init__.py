"""Which optimizers may be sharded: their steps are tried on small tensors.

``probe`` decides for each group: one that is element-wise (``elementwise``) is stepped as flat shards, one that steps
each parameter by itself (``per_parameter``) as whole parameters by their owners; any other one is refused.
"""

from .elementwise import Findings, check_fp32_state, check_main_param_steps
from .known_findings import KnownFindings
from .later_trials import LaterTrials
from .values import NotForShardsError, describe_undividable, is_per_element

__all__ = [
    "Findings",
    "KnownFindings",
    "LaterTrials",
    "NotForShardsError",
    "check_fp32_state",
    "check_main_param_steps",
    "describe_undividable",
    "is_per_element",
]
