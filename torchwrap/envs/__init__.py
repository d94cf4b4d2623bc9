"""Native envs, one a file; `torchwrap.make` finds them by id."""
