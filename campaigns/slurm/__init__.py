"""Signals in jobs of a real Slurm: ``python -m campaigns.slurm`` where ``sbatch`` is; see docs/project/launchers.md."""
