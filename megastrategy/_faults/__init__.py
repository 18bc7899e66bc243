"""Ends all ranks of a process group, with a reason, where one fails, leaves or waits in vain."""
