"""One intra-op thread everywhere: ranks are threads or processes here, and share two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
