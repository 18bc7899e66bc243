"""Imports what the examples import, and what cut models need, for the server whose forks run them."""

from __future__ import annotations

import gc

import accelerate
import lightning
import lightning.fabric
import lightning.pytorch
import matplotlib.pyplot
import safetensors.torch
import sklearn.datasets
import transformers.trainer

from . import pipelines, processes

__all__ = ["accelerate", "lightning", "matplotlib", "pipelines", "processes", "safetensors", "sklearn", "transformers"]

# What is imported stays: a fork that collects garbage, as accelerate often does, would walk through all of it, and copy
# the pages it touches.
gc.freeze()
