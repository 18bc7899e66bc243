"""Step time, bytes and processor time of this engine and its peers, in one run: see benchmarks/README.md."""
