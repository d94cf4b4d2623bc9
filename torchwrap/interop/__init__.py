"""Adapters for other libraries: one file per library, imported only with that file."""
