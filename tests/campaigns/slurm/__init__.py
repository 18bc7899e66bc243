"""Signals in jobs of a real Slurm: ``python -m tests.campaigns.slurm`` where ``sbatch`` is; see docs/signals.md."""
