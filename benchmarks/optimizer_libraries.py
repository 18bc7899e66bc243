"""The packages that optimizers come from, and the optimizers that are tried."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Library:
    """A package that optimizers come from.

    Attributes:
        package: what pip installs.
        module: what is imported.
        names: of its optimizers, with constructor options in brackets if they are not its defaults.
        muons: the ones that get matrices in a separate group.
        source: where pip finds it, if not on the index.
        told: for ``muons``, the options of the group of matrices and of the group of other parameters.
    """

    package: str
    module: str
    names: tuple[str, ...]
    muons: tuple[str, ...] = ()
    source: str | None = None
    told: tuple[Mapping[str, Any], Mapping[str, Any]] = ({"use_muon": True}, {"use_muon": False})

    @property
    def requirement(self) -> str:
        """The argument of ``pip install``."""
        return self.source or self.package

    @property
    def version(self) -> str | None:
        """The installed one; None if there is none."""
        try:
            return release(importlib.metadata.version(self.package))
        except importlib.metadata.PackageNotFoundError:
            return None


LIBRARIES = (
    Library(
        "torch",
        "torch.optim",
        (
            *("SGD", "SGD(momentum=0.9, nesterov=True)", "SGD(momentum=0.9, fused=True)", "Adam", "Adam(amsgrad=True)"),
            *("AdamW", "AdamW(foreach=True)", "AdamW(fused=True)", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax"),
            *("RMSprop(momentum=0.9, centered=True)", "Rprop", "ASGD", "Adafactor", "Muon", "LBFGS", "SparseAdam"),
        ),
        muons=("Muon",),
    ),
    Library(
        "timm",
        "timm.optim",
        (
            *("AdaBelief", "Adafactor", "AdafactorBigVision", "Adahessian", "AdamP", "Adan"),
            *(
                "Adopt",
                "LaProp",
                "LaProp(caution=True)",
                "Lamb",
                "Lamb(max_grad_norm=None)",
                "Lars",
                "Lars(weight_decay=0.01)",
                "Lion",
                "Lion(caution=True)",
                "MADGRAD",
                "Mars",
                "Muon",
            ),
            *("NAdamW", "NvNovoGrad", "RAdam", "RMSpropTF", "SGDP(lr=0.01, momentum=0.9)", "SGDW(momentum=0.9)"),
        ),
    ),
    Library(
        "bitsandbytes",
        "bitsandbytes.optim",
        (
            *("Adagrad", "Adam", "AdamW", "AdamW8bit", "AdEMAMix8bit", "Lion", "Lion8bit", "PagedAdamW8bit"),
            *(
                "RMSprop",
                "SGD(lr=0.01, momentum=0.9)",
                "SGD8bit(lr=0.01, momentum=0.9)",
                "LAMB",
                "LARS(lr=0.01, momentum=0.9)",
            ),
        ),
    ),
    Library("torchao", "torchao.optim", ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamWFp8", "_AdamW")),
    Library("schedulefree", "schedulefree", ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")),
    Library("prodigyopt", "prodigyopt", ("Prodigy",)),
    Library(
        "dadaptation",
        "dadaptation",
        ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD(momentum=0.9)"),
    ),
    Library("dog-optimizer", "dog", ("DoG", "LDoG")),
    Library(
        "lion-pytorch",
        "lion_pytorch",
        ("Lion", "Lion(weight_decay=0.1)", "Lion(decoupled_weight_decay=True, weight_decay=0.1)"),
    ),
    Library(
        "pytorch_optimizer",
        "pytorch_optimizer",
        (
            *("A2Grad", "ADOPT", "AccSGD", "AdEMAMix", "AdaBelief", "AdaBound", "AdaFactor", "AdaGC", "AdaHessian"),
            *("AdaMod", "AdaNorm", "AdaPNM", "AdaShift", "AdaSmooth", "AdaTAM", "Adai", "Adalite", "AdamC", "AdamG"),
            *("AdamP", "AdamS", "Adan", "AggMo", "Aida", "Amos", "ApolloDQN", "AvaGrad", "CAME"),
            *("DiffGrad", "EXAdam", "FAdam", "FOCUS", "FTRL", "Fromage", "Grams", "Gravity", "GrokFastAdamW", "Kate"),
            *("LARS", "LaProp", "Lamb", "Lion", "MADGRAD", "MARS", "MSVAG", "Nero", "NovoGrad", "PAdam", "PID", "PNM"),
            *(
                "Prodigy",
                "QHAdam",
                "QHM",
                "Ranger",
                "Ranger21(num_iterations=100)",
                "SCION",
                "SGDP",
                "SGDSaI",
                "SGDW",
                "SM3",
                "SOAP",
            ),
            *("SPAM", "SRMM", "SWATS", "Shampoo", "SignSGD", "SimplifiedAdEMAMix", "StableAdamW", "StableSPAM"),
            *("TAM", "Tiger", "VSGD", "Yogi", "Lookahead"),
            *("APOLLO", "AdaGO", "AdaMuon", "AdamWSN", "Alice", "Ano", "BCOS", "Conda", "DualAdam", "Fira"),
            *("FlashAdamW", "GaLore", "Kron", "Magma", "Muon", "NorMuon", "RACS", "ROSE", "SCIONLight", "SaRA"),
            *("SPlus", "ScalableShampoo", "SophiaH", "SpectralSphere"),
        ),
        muons=("AdaGO", "AdaMuon", "Muon", "NorMuon"),
    ),
    Library(
        "dion",
        "dion",
        ("Muon", "NorMuon", "Dion(lr=0.01)", "Dion2", "NorDion2"),
        muons=("Muon", "NorMuon", "Dion", "Dion2", "NorDion2"),
        source="git+https://github.com/microsoft/dion",
        told=({}, {"algorithm": "adamw"}),
    ),
)


def release(version: str) -> str:
    return version.split("+")[0]
