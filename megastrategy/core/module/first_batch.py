"""Compares the first batch, and the random states, of ranks that share one model.

[Note: one batch for a tensor group]
The ranks of a tensor group compute one model together. With different batches they train on a mixture, and nothing
fails: shapes fit, and the loss goes down. The masks of a dropout on full activations, which each rank draws by itself,
are such an input too. Both are compared once, in the first forward that trains: a sampler that uses the wrong rank, or
a seed that differs, shows from the first batch on.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..collectives import Collectives, digest_of
from ..errors import BatchMismatchError


def check_first_batch(
    args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Collectives, device: torch.device, *, of_stages: bool = False
) -> None:
    """Compares a forward's arguments on ``ranks``, and their random states unless they are stages. Collective.

    Different random states are a warning on the first rank.

    Raises:
        BatchMismatchError: on all ranks, with the path of the first tensor that differs.
    """
    one, kind = ("stages", "stage") if of_stages else ("a tensor group", "tensor rank")
    named = {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}
    own = {path: _fingerprint(tensor) for name, value in named.items() for path, tensor in _walk(name, value)}
    everybody = ranks.all_gather_objects((own, _random_states(device)))
    expected, expected_states = everybody[0]
    for rank, (theirs, _) in enumerate(everybody):
        paths = [path for path in {**expected, **theirs} if expected.get(path) != theirs.get(path)]
        if paths:
            raise BatchMismatchError(
                f"the batches differ inside of {one}: {paths[0]} is {_shown(expected, paths[0])} on its first "
                f"rank and {_shown(theirs, paths[0])} on {kind} {rank}. All ranks of {one} need the same "
                "batch: choose a sampler's rank, and seed what makes batches, by the data-parallel rank "
                '(mesh.get_local_rank("dp")).'
                + ("" if of_stages else " Pass a tensor of which each rank has a part on purpose as a DTensor: ")
                + ("" if of_stages else 'DTensor.from_local(part, mesh["tp"], [Shard(1)])')
            )
    if of_stages:
        return
    differing = [rank for rank, (_, states) in enumerate(everybody) if states != expected_states]
    if differing and ranks.is_rank_zero:
        kind = next(kind for kind, state in expected_states.items() if everybody[differing[0]][1].get(kind) != state)
        warnings.warn(
            f"the random state of {kind} differs inside of a tensor group, between its first rank and tensor "
            f"rank{'s' * (len(differing) > 1)} {', '.join(map(str, differing))}: each draws another dropout for "
            "activations that all have whole. Seed by the data-parallel rank: "
            'torch.manual_seed(seed + mesh.get_local_rank("dp"))',
            stacklevel=2,
        )


def _fingerprint(tensor: Tensor) -> tuple[str, str]:
    """Returns a tensor's dtype and shape as text, and a digest of its elements."""
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return kind, digest_of(tensor)


def _shown(tensors: Mapping[str, tuple[str, str]], path: str) -> str:
    if path not in tensors:
        return "missing"
    kind, digest = tensors[path]
    return f"{kind} with digest {digest[:8]}"


def _random_states(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: digest_of(state) for kind, state in states.items()}


def _walk(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    # A DTensor's placements say which part is where; sparse and quantised tensors have no strided elements.
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout == torch.strided and not value.is_meta:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{path}[{key!r}]", item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for number, item in enumerate(value):
            yield from _walk(f"{path}[{number}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(f"{path}.{field.name}", getattr(value, field.name, None))
