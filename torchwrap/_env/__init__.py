"""Machinery of envs, above `spaces` and `random`: facade, checks, executor, snapshots, repeated steps. Private."""
