"""Signals in jobs of a real Slurm: ``python -m tests.slurm`` where ``sbatch`` is; docs/signals.md has the results."""
