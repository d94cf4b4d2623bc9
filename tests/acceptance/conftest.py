import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def threads():
    """The scripts set PyTorch's number of threads."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
