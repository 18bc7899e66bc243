"""One intra-op thread everywhere: ranks are threads or processes here, and share two cores.

Processes of ranks are forks of one server a worker, which imports the frameworks when the first of them is asked for.
"""

from __future__ import annotations

import multiprocessing

import torch

torch.set_num_threads(1)
multiprocessing.set_forkserver_preload(["tests.doors.fits", "tests.support.preloaded"])
