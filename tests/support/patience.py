"""Bounds how long tests wait before they call it a hang."""

HANG_S = 600.0
"""Nothing is asserted by it: a loaded machine was seen to take ten times as long as a quiet one."""
