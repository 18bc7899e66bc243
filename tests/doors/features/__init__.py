"""What users do with ``"ddp"``, an area a module: each lists FEATURES, and BEYOND where ``"ddp"`` cannot."""
