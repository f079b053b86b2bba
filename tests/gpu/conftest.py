"""The interpreter multiplies as tensor cores do: in tf32 they leave out the last 13 digits of each number."""

import os
import sys
import warnings

import numpy as np
import pytest
import torch

from subquad.kernels.triton import INTERPRETED


@pytest.fixture(autouse=True, scope="session")
def products_of_tensor_cores():
    if not INTERPRETED:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        exact = interpreter.InterpreterBuilder.create_dot

        def create_dot(self, a, b, d, input_precision, *rest):
            if str(input_precision).endswith(".TF32"):
                a, b = (interpreter.TensorHandle(truncated(one.data), one.dtype) for one in (a, b))
            return exact(self, a, b, d, input_precision, *rest)

        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(autouse=True, scope="session")
def threads_of_gradients_know_the_device():
    # PyTorch warns of the first product there
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.ones(2, 2, device="cuda", requires_grad=True)
            torch.autograd.grad((x @ x).sum(), x)


def pytest_runtest_logfinish(nodeid, location):
    """A process whose kernel read what is not its own can do nothing more with its device: xdist begins another."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        sys.stderr.write(f"{nodeid}: {error}\n")
        os._exit(1)


def truncated(numbers):
    """What tensor cores see of fp32 numbers in tf32."""
    if numbers.dtype != np.float32:
        return numbers
    return (np.ascontiguousarray(numbers).view(np.int32) & ~np.int32(0x1FFF)).view(np.float32)
