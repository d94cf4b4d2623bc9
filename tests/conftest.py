"""Tests in every folder find `catalogue`, and what several of them need."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def graphs():
    """The backend "counting", and every graph that it has compiled so far."""
    made = []

    def counting(graph, example):
        made.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch._dynamo.register_backend(counting, name="counting")
    yield made
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")
