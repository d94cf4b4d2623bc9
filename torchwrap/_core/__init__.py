"""Machinery that envs, transforms and spaces share. Private: nothing here is part of the API."""
