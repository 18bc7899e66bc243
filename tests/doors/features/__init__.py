"""Uses of ``"ddp"``, an area a module: each lists FEATURES, and BEYOND for those that ``"ddp"`` cannot run."""
