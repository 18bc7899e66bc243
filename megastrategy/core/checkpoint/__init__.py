"""Optimizer state between this rank's shards and what is saved: torch's own full format, and sharded directories."""
