"""Measurements against peers: `python -m tests.benchmarks --json F`, from the root of the repository."""
