"""Kills processes of replicas at random times."""
