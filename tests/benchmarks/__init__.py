"""Benchmarks against other libraries: run `python -m tests.benchmarks --json F` from the root of the repository."""
