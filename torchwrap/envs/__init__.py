"""Native envs, one per file. `torchwrap.make` finds them by id."""
