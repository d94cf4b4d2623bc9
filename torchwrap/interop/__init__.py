"""Adapters for other libraries, one file per library, which is imported only with that file."""
