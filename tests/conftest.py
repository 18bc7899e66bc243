"""One intra-op thread everywhere: ranks are threads or processes here, and share two cores.

Processes of ranks are forks of one server, which all workers share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .support import chosen_collectives, odd_offsets, shared_fork_server
from .support.lazy_collectives import violations
from .support.thread_mode import forget_entered_modes, take_stance_back
from .support.timeouts import REPORT_S, stacks_written_after

FOLDER = Path(__file__).parent

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the server: forks of a process with OpenMP's threads would hang
multiprocessing.set_forkserver_preload(["tests.doors.fits", "tests.support.preloaded"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--collectives",
        choices=chosen_collectives.DELIVERIES,
        help="put these around whatever collectives the engine uses, see tests/support/lazy_collectives.py",
    )
    parser.addoption(
        "--backend", choices=chosen_collectives.BACKENDS, help="how gloo sends: process-group is how NCCL is used"
    )
    parser.addoption(
        "--in-flight-guard",
        action="store_true",
        help="with lazy collectives, raise where a rank that is a thread touches what is in flight",
    )
    parser.addoption(
        "--odd-offsets",
        action="store_true",
        help="begin the memory of weights and gradients at odd addresses, see tests/support/odd_offsets.py",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by xdist for each worker, before it starts."""
    node.workerinput["fork_server"] = shared_fork_server.start()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("odd_offsets") and odd_offsets.VARIABLE not in os.environ:
        os.environ[odd_offsets.VARIABLE] = "1"
        odd_offsets.install()
    if (server := getattr(config, "workerinput", {}).get("fork_server")) is not None:
        shared_fork_server.use(*server)
    choice = chosen_collectives.Choice.of(config)
    if choice != chosen_collectives.Choice():
        chosen_collectives.choose(choice)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with stacks_written_after(REPORT_S):
        yield


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    # Modules and test items stay to the end, and each collection of garbage would walk through them.
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def contract_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails for every breach of the contract of collectives, also if its exception was caught."""
    with contextlib.ExitStack() as stack:
        if request.node.get_closest_marker("real_collectives") is not None:
            stack.enter_context(chosen_collectives.choosing(chosen_collectives.Choice()))
        elif request.node.get_closest_marker("unguarded") is not None:
            unguarded = dataclasses.replace(chosen_collectives.chosen, is_guarded=False)
            stack.enter_context(chosen_collectives.choosing(unguarded))
        violations.clear()
        yield
    assert not violations


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """Nothing is compiled any more in a process where torch takes a mode for entered, nor in another stance of its."""
    yield
    # torch's compiler has modes of its own, which it enters in each rank that compiles; ranks are threads here alone.
    if "torch._dynamo" in sys.modules:
        forget_entered_modes()
        left = take_stance_back()
        assert left == "default", f"torch.compile's stance was left at {left!r}: nothing is compiled any more"
    assert not is_in_torch_dispatch_mode()
    threshold = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    assert threshold == logging.NOTSET


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests that -m has left."""
    # Tests of programs wait for them: begun last, they would keep one worker busy when the others have ended.
    first_and_last = {"tools": 0, "core": 2}
    items.sort(key=lambda item: first_and_last.get(item.path.relative_to(FOLDER.parent).parts[1], 1))
