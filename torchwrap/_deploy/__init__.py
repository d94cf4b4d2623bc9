"""Deployment: a policy with the transforms of its env as one module. Private; `torchwrap.deploy` is the entry point."""
