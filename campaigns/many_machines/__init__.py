"""Launchers of many machines, as they are: Ray Train, torchrun's elastic agents."""
