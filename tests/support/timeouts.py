"""Bounds how long tests wait before they call it a hang."""

HANG_S = 600.0
"""Nothing is asserted by it: a loaded machine was seen to take ten times as long as a quiet one."""

REPORT_S = 60.0
"""Seconds until a job of several processes writes Python's stacks of its ranks to stderr, and goes on."""
