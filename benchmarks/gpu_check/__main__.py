"""``python -m benchmarks.gpu_check``."""

from __future__ import annotations

import os
import sys

# Before torch is imported: it has a warning for each group that is made by hand.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from .command import main

if __name__ == "__main__":
    sys.exit(main())
