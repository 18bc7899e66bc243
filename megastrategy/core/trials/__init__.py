"""Which optimizers may be sharded: their steps are tried on small tensors."""

from .elementwise import Findings, equal, is_per_element, why_not_in_fp32, why_not_main_params, why_not_saved
from .isolation import CommunicationError, no_communication
from .known_findings import KnownFindings
from .later_trials import LaterTrials
from .method_trial import Effect, looks_at_tensors, try_call
from .optimizer_double import Call, NotForShardsError
from .step_arguments import StepArguments

__all__ = [
    "Call",
    "CommunicationError",
    "Effect",
    "Findings",
    "KnownFindings",
    "LaterTrials",
    "NotForShardsError",
    "StepArguments",
    "equal",
    "is_per_element",
    "looks_at_tensors",
    "no_communication",
    "try_call",
    "why_not_in_fp32",
    "why_not_main_params",
    "why_not_saved",
]
