"""What the addresses of Lightning's four packages share: strategies, precision, signals, callbacks."""
