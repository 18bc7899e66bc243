"""What makes all ranks of a process group end, and with a reason, where one fails, leaves or waits in vain."""
