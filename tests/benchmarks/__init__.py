"""Benchmarks against other libraries: `python -m tests.benchmarks --json F`, from the root.

A suite is a function `run(options) -> {name: figures}`, listed in `SUITES` in `__main__.py`; most
are rows for `measure.compare`. A side is a module with functions that return a `worker.Timed`. Each
foreign library is imported only in its own `<name>_peer.py`, and matplotlib only in `plot.py`. A
comparison in the tables is an entry of `CLAIMS` or `MORE` in `report.py`.
"""
