"""From an env or a collector to compiled graphs."""
