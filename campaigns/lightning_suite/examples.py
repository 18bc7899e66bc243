"""Jobs of ranks: Lightning's own tensor-parallel examples, and their model in one process on all batches."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

MODULES = ("data", "model", "parallelism", "train")
"""The files of an example, which import each other by these names."""
VOCAB = 512
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32, "max_seq_len": 256}


@contextlib.contextmanager
def _imported(folder: str) -> Iterator[SimpleNamespace]:
    """The modules of an example by their names, with a small model, and batches that this process makes itself."""
    sys.path.insert(0, folder)
    # They choose weights after the model is set up, without a seed, and each data-parallel rank chooses for itself.
    torch.manual_seed(0)
    try:
        found = SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        found.train.ModelArgs = _small_args(found.model)
        found.train.DataLoader = lambda dataset, batch_size, **_: DataLoader(dataset, batch_size)
        yield found
    finally:
        sys.path.remove(folder)
        for name in MODULES:
            sys.modules.pop(name, None)


def _small_args(model: ModuleType) -> Callable[..., Any]:
    """Their sizes are for GPUs of 24 GB."""
    return lambda **_: model.ModelArgs(vocab_size=VOCAB, **SMALL)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """Whole ones. Collective."""
    return {name.replace("_checkpoint_wrapped_module.", ""): _whole(param) for name, param in module.named_parameters()}


def fit(folder: str) -> dict[str, Any]:
    """``examples/pytorch/tensor_parallel/train.py``."""
    with _imported(folder) as example:
        found: dict[str, Any] = {"losses": [], "batches": []}

        class Recorded(example.train.Llama3):  # type: ignore[misc, name-defined]
            def on_train_start(self) -> None:
                found["on_meta_before"] = on_meta
                super().on_train_start()
                found["start"] = _weights(self.model)

            def training_step(self, batch: Tensor) -> Tensor:
                found["batches"].append(batch.clone())
                loss = super().training_step(batch)
                found["losses"].append(float(_whole(loss)))
                return loss

            def on_train_end(self) -> None:
                found["weights"] = _weights(self.model)

        on_meta = False

        def make() -> nn.Module:
            nonlocal on_meta
            module = Recorded()
            on_meta = all(param.is_meta for param in module.parameters())
            return module

        example.train.Llama3 = make
        trainer = example.train.L.Trainer  # the package's, which others use after this
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        example.train.L.Trainer = functools.partial(trainer, **quiet)
        try:
            example.train.train()
        finally:
            example.train.L.Trainer = trainer
        return found


def loop(folder: str, to: str) -> dict[str, Any]:
    """``examples/fabric/tensor_parallel/train.py``, which saves ``checkpoint.pt`` where it is, in ``to`` here."""
    with _imported(folder) as example, contextlib.chdir(to):
        found: dict[str, Any] = {"losses": [], "batches": []}

        class Recording(example.train.L.Fabric):  # type: ignore[misc, name-defined]
            def setup_dataloaders(self, data: Any) -> Any:
                def noted() -> Iterator[Tensor]:
                    for batch in prepared:
                        found["batches"].append(batch.clone())
                        yield batch

                prepared = super().setup_dataloaders(data)
                return noted()

            def setup(self, module: nn.Module, *others: Any, **options: Any) -> Any:
                found["on_meta_before"] = all(param.is_meta for param in module.parameters())
                self.seen = module
                return super().setup(module, *others, **options)

            def backward(self, loss: Tensor, *others: Any, **options: Any) -> None:
                found.setdefault("start", _weights(self.seen))
                found["losses"].append(float(_whole(loss)))
                super().backward(loss, *others, **options)

            def save(self, path: str, state: dict[str, Any], *others: Any, **options: Any) -> None:
                super().save(path, state, *others, **options)
                found["weights"] = _weights(self.seen)

        example.train.L = SimpleNamespace(Fabric=Recording)
        example.train.train()
        return found


def alone(folder: str, start: dict[str, Tensor], batches: list[Tensor]) -> dict[str, Any]:
    """Trains their model in one process with torch alone, from these weights and on these batches."""
    with _imported(folder) as example:
        model = example.model.Transformer(_small_args(example.model)())
        missing = model.load_state_dict(start, strict=False)
        assert (missing.missing_keys, missing.unexpected_keys) == (["freqs_cis"], []), "which is computed"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for tokens in batches:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {"losses": losses, "weights": _weights(model)}


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found
