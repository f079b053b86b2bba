"""What the tests of the CPU kernels share."""

import pytest
import torch


@pytest.fixture
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)
