"""Finds out how optimizers are sharded: each is trained on two ranks under torch DDP and here, saved and resumed.

    python -m benchmarks.optimizers --help

Libraries that are not installed are left out, with a line on how to install them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
import importlib
import importlib.metadata
import io
import logging
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.optimizer_libraries import LIBRARIES, Library, release
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from megastrategy.core.judge.classification import classify

NUM_RANKS = 2
_NUM_STEPS = 6
"""Steps before a checkpoint, and after it."""
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "tried_optimizers.md"
TIMEOUT = datetime.timedelta(seconds=60)
CLOSE = 1e-6


# --- one optimizer ---------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    """A convolution, matrices of more and of less than 4,096 elements, a norm, biases and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.inner, self.norm, self.head = nn.Linear(12 * 16, 96), nn.LayerNorm(96), nn.Linear(96, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(images)).flatten(1)
        logits: Tensor = self.scale * self.head(torch.tanh(self.norm(self.inner(hidden))))
        return logits


def _model() -> _Model:
    return copy.deepcopy(_PRISTINE)


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    _PRISTINE = _Model()


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    labels = torch.randint(10, (8,), generator=generator)
    images = torch.randn(8, 3, 6, 6, generator=generator) + 0.3 * labels.view(-1, 1, 1, 1)
    return F.cross_entropy(model(images), labels)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One rank's weights and one state when it saved, and its weights after it had resumed.

    Attributes:
        how: "flat", "whole" or "mixed": what of the parameters the ranks step; "" under torch DDP.
    """

    saved: dict[str, Tensor]
    state: dict[str, Any]
    resumed: dict[str, Tensor]
    how: str = ""


class Found(NamedTuple):
    """Says what became of an optimizer.

    Attributes:
        how: "flat", "whole", "mixed" or "refused"; "" if it is unknown.
        result: in words; begins with "DIFFERENT" or "FAILED" where it should not be as it is.
    """

    how: str
    result: str

    @property
    def cells(self) -> str:
        """The cells of the table's row."""
        result = " ".join(self.result.split()).replace("|", "\\|")
        return f"{self.how} | {result}"


Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
Wrap = Callable[[_Model, Make], tuple[nn.Module, Any]]


def _train(make: Make, wrap: Wrap, rank: int, share: Callable[[bytes], bytes]) -> Outcome:
    """Some steps, a checkpoint, and as many more with what is built anew and loaded."""
    weights, file, how = _model().state_dict(), None, ""
    seen: list[dict[str, Tensor]] = []
    for first in (0, _NUM_STEPS):
        module = _model()
        module.load_state_dict(weights)
        model, optimizer = wrap(module, make)
        if file is not None:
            optimizer.load_state_dict(_read(file))
        _call_if_there(optimizer, "train")
        for step in range(first, first + _NUM_STEPS):
            optimizer.zero_grad()
            _loss(model, rank, step).backward()
            optimizer.step()
        _call_if_there(optimizer, "eval")
        if file is None:
            file = share(_written(optimizer.state_dict()))
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        seen.append(weights)
        if isinstance(model, DistributedDataParallel):
            how = _how(optimizer)
            model.close()
    assert file is not None
    return Outcome(seen[0], _read(file), seen[1], how)


def _written(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _read(file: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=False)
    return state


def _how(optimizer: DistributedOptimizer) -> str:
    indices = optimizer._impl.neighbour_groups().keys()
    whole = optimizer._impl.owners().keys()
    return "whole" if whole == indices else "mixed" if whole else "flat"


def _call_if_there(optimizer: Any, name: str) -> None:
    if callable(method := getattr(optimizer, name, None)):
        method()


def _under_ddp(make: Make) -> list[Outcome]:
    def run(rank: int, group: ProcessGroup) -> Outcome:
        def wrap(module: _Model, make: Make) -> tuple[nn.Module, Any]:
            return TorchDDP(module, process_group=group), make(list(module.parameters()))

        return _train(make, wrap, rank, lambda file: file)

    return _on_ranks(run)


def _under_ours(make: Make) -> list[Outcome]:
    def run(rank: int, group: ProcessGroup) -> Outcome:
        collectives: list[Any] = []

        def wrap(module: _Model, make: Make) -> tuple[nn.Module, Any]:
            model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=4000), group)
            collectives[:] = [model.engine.collectives]
            return model, DistributedOptimizer(make(list(module.parameters())), model)

        def share(file: bytes) -> bytes:
            return bytes(collectives[0].all_gather_bytes(file)[0])

        return _train(make, wrap, rank, share)

    return _on_ranks(run)


_retired: collections.deque[ProcessGroup] = collections.deque(maxlen=16)
"""Groups whose ranks have ended: gloo's threads are idle by the time they leave here."""


def _on_ranks(run: Callable[[int, ProcessGroup], Outcome]) -> list[Outcome]:
    """``run(rank, group)`` on threads, each over a gloo group of its own; raises what was raised first."""
    store = HashStore()
    outcomes: list[Any] = [None] * NUM_RANKS
    errors: list[Exception] = []

    def target(rank: int) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroup(store, rank, NUM_RANKS)
        backend = ProcessGroupGloo(store, rank, NUM_RANKS, options)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        try:
            outcomes[rank] = run(rank, group)
        except Exception as error:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            errors.append(error)  # the other rank's comes later: it waited for this one
        _retired.append(group)

    threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outcomes


def _make(library: Library, name: str) -> Make:
    """``Adam(amsgrad=True)`` as a function of parameters; its own defaults where nothing is said."""
    kind, _, given = name.removesuffix(")").partition("(")
    options = eval(f"dict({given})")
    found = getattr(importlib.import_module(library.module), kind)
    if kind == "Lookahead":
        return lambda params: found(torch.optim.SGD(params))

    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        params = list(params)
        if kind in library.muons:
            matrices, others = ([param for param in params if (param.dim() == 2) is is_one] for is_one in (True, False))
            # torch's takes nothing else; the other libraries' step the rest as AdamW does
            groups = [{"params": part, **told} for part, told in zip((matrices, others), library.told, strict=True)]
            params = matrices if library.module == "torch.optim" else groups
        optimizer: torch.optim.Optimizer = found(params, **options)
        return optimizer

    return make


def try_optimizer(library: Library, name: str) -> Found:
    """Trains with it here and under torch DDP, and compares."""
    try:
        make = _make(library, name)
        make(list(_model().parameters()))
    except Exception as error:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
        return Found("", f"cannot be built here: {_said(error)}")
    try:
        ours = _under_ours(make)
    except OptimizerNotShardableError as error:
        text = str(error)
        reason = text.partition(" cannot be sharded: ")[2].partition(". Pass ")[0]
        return Found("refused", reason or text.partition(". Use ")[0])  # the second for one that trains in no mode
    except Exception as error:  # noqa: BLE001 - as above
        return Found("", f"FAILED after it was wrapped: {_said(error)}")
    try:
        theirs = _under_ddp(make)
    except Exception as error:  # noqa: BLE001 - as above
        return Found(ours[0].how, f"FAILED under torch DDP, and not here: {_said(error)}")
    return Found(ours[0].how, compare(ours, theirs))


def compare(ours: list[Outcome], theirs: list[Outcome]) -> str:
    """Says in words, over all ranks: weights when saved, what was saved, and weights after resuming."""
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        worst = max(worst, _distance(mine.saved, other.saved), _distance(mine.resumed, other.resumed))
    saved = _distance(*(_of_what_is_kept(outcomes[0].state) for outcomes in (ours, theirs)))
    if worst == saved == 0:
        return "equal to the bit"
    if max(worst, saved) <= CLOSE:
        return f"within {CLOSE:.0e}".replace("e-0", "e-")
    return f"DIFFERENT: weights by {worst:.1e}, saved state by {saved:.1e} of the largest element"


def _of_what_is_kept(state: dict[str, Any]) -> dict[str, Any]:
    """Without the empty entries that some optimizers make for parameters without state."""
    return state | {"state": {number: values for number, values in state["state"].items() if values != {}}}


def _distance(mine: Any, other: Any) -> float:
    """The largest difference of two nested values, relative to each tensor's largest element; infinite if their
    structures differ."""
    one, two = _inside(mine), _inside(other)
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _distance_of_tensors(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return (
            max((_distance(one[key], two[key]) for key in one), default=0.0) if one.keys() == two.keys() else math.inf
        )
    return 0.0 if type(one) is type(two) and one == two else math.inf


def _inside(value: Any) -> Any:
    """Looks inside, by name or place: containers, tensors of another kind, objects of an optimizer's own."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    if isinstance(value, list | tuple | collections.deque):
        return {(type(value), place): item for place, item in enumerate(value)}
    is_own = hasattr(value, "__dict__") and not isinstance(value, Tensor | type) and not callable(value)
    return dict(vars(value)) if is_own else value


def _distance_of_tensors(mine: Tensor, other: Tensor) -> float:
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return math.inf
    one, two = mine.double(), other.double()  # of 8 bits too, which know no comparison
    if torch.equal(one, two):
        return 0.0
    distance = float((one - two).abs().max() / two.abs().max().clamp(min=1e-300))
    return distance if math.isfinite(distance) else math.inf


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160].rstrip(": ")


# --- the table -------------------------------------------------------------------------------------------------------


def classification_ms(library: Library, name: str) -> float:
    """Returns the CPU time of the test at the wrap, in milliseconds; NaN if the optimizer cannot be built here."""
    try:
        optimizer = _make(library, name)(_model().parameters())
    except Exception:  # noqa: BLE001 - whatever an unknown optimizer raises, nothing is tested
        return math.nan
    start = time.process_time()
    classify(optimizer, torch.device("cpu"), torch.float32)
    return (time.process_time() - start) * 1e3


def print_times(libraries: Iterable[Library]) -> None:
    """Prints the time of the test at the wrap, by library that is installed, and over all."""
    all_ms: list[float] = []
    for library in libraries:
        found = {name: classification_ms(library, name) for name in (library.names if library.version else ())}
        built = {name: ms for name, ms in found.items() if not math.isnan(ms)}
        all_ms += built.values()
        for name in sorted(built, key=built.__getitem__)[-1:]:
            median = statistics.median(built.values())
            click.echo(f"{library.package}: {len(built)}, median {median:.1f} ms, most {built[name]:.0f} ms ({name})")
    click.echo(f"all: {len(all_ms)}, median {statistics.median(all_ms or [math.nan]):.1f} ms of one core")


def rows_of(library: Library) -> Iterator[str]:
    """Lines of the table, as they are found."""
    version = library.version
    assert version is not None, "installed"
    for name in library.names:
        yield f"| `{name}` | {library.package} {version} | {try_optimizer(library, name).cells} |"


def page(rows: list[str], command: str) -> str:
    """The page with these rows: the words above its table stay as they are."""
    cells = [row.replace(r"\|", "").split(" | ") for row in rows]
    hows = collections.Counter(cell[2] for cell in cells)
    results = collections.Counter(cell[3].removesuffix(" |") for cell in cells if cell[2] != "refused")
    counted, compared = (
        ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) for counts in (hows, results)
    )
    others = " ".join(library.requirement for library in LIBRARIES[1:])
    words, _, _ = PAGE.read_text(encoding="utf-8").partition("\nOf ")
    head = f"""{words}
Of {len(rows)}: {counted}; {compared}.
Written on {datetime.date.today()}, on a CPU, with torch {release(torch.__version__)}, by

```bash
pip install {others}
{command}
```

| optimizer | library | how | result |
|---|---|---|---|
"""
    return head + "".join(f"{row}\n" for row in rows)


@contextlib.contextmanager
def _quiet_and_uncompiled() -> Iterator[None]:
    """Has the settings of the process that suit this command, and puts them back: tests call it in their own."""
    threshold, num_threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager"):  # the same arithmetic
            yield
    finally:
        logging.disable(threshold)
        torch.set_num_threads(num_threads)


@click.command(help="Tries optimizers of many libraries under torch DDP and here, and prints a table of the results.")
@click.option("--library", "packages", multiple=True, type=click.Choice([library.package for library in LIBRARIES]))
@click.option("--times", is_flag=True, help="Prints the time of the test at the wrap instead, by library.")
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), help="The page to write, with all libraries.")
def main(*, packages: tuple[str, ...], times: bool, write: Path | None) -> None:
    """The command."""
    click.get_current_context().with_resource(_quiet_and_uncompiled())
    if times:
        print_times([library for library in LIBRARIES if not packages or library.package in packages])
        return
    rows: list[str] = []
    missing = []
    for library in LIBRARIES:
        if packages and library.package not in packages:
            continue
        if library.version is None:
            missing.append(library.requirement)
            continue
        for row in rows_of(library):
            click.echo(row)
            rows.append(row)
    if missing:
        click.echo(f"not installed, and left out: pip install {' '.join(missing)}", err=True)
    if write is not None:
        if missing or packages:
            raise click.ClickException(f"{write} has all libraries, and is not written without some")
        write.write_text(page(rows, f"python -m benchmarks.optimizers --write {write}"), encoding="utf-8")
    wrong = [row for row in rows if "| DIFFERENT" in row or "| FAILED" in row]
    if wrong:
        raise click.ClickException("neither equal nor refused:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
