"""Passes that are recorded as CUDA graphs, to be timed without what Python takes to start them."""

import torch

from subquad.errors import SubquadError, reason_of
from subquad.timing import Run


def recorded(run: Run, device: torch.device) -> Run:
    """Replay a CUDA graph of a pass: what the device does, without Python between its kernels.

    Raises:
        SubquadError: it is no CUDA device, or what runs cannot be recorded, in one line.
    """
    if device.type != "cuda":
        raise SubquadError(f"CUDA graphs are recorded on a CUDA device, and {device} is none")
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        # what libraries and compilers do at a first call cannot be recorded
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        raise SubquadError(f"it can't be recorded as a CUDA graph: {reason_of(error)}") from None
    return graph.replay
