"""Shared by the addresses of Lightning's four packages: strategies, precision, signals, callbacks."""
