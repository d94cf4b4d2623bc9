"""Compilation: graphs of a step, of a transform and of a rollout. Private; `torchwrap.compile` is the entry point."""
