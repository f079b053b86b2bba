"""Seconds of an update of the Long Range Arena's ListOps network, on sequences of their lengths and filled up.

OMP_NUM_THREADS=1 python scripts/sequence_steps.py --attention linear softmax
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from subquad.attention import ATTENTION
from subquad.tasks.sequences.lra_data import SEQUENCES
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model

LENGTH, BATCH = 2048, 32


def main() -> None:
    """Time both ways in turns and print a line for each mechanism."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", nargs="+", default=["linear", "softmax", "pola", "inline"], choices=ATTENTION)
    parser.add_argument("--updates", type=int, default=5)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lengths = torch.randint(500, 2000, (BATCH, 1))
    symbols = SEQUENCES["listops"].symbols
    tokens = torch.randint(1, symbols, (BATCH, LENGTH)) * (torch.arange(LENGTH) < lengths)
    print("attention   filled up   by length   ratio")
    for name in arguments.attention:
        sizes = {"vocab_size": symbols, "max_length": LENGTH, "num_classes": 10}
        model = create_sequence_model(name, **sizes)
        pooling = model.pooling
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for update in range(arguments.updates + 1):
            for filled in seconds:
                # the network fills up where a mechanism pools
                model.pooling = filled or pooling
                taken = step(model, tokens)
                if update:  # the first warms up
                    seconds[filled].append(taken)
        filled_up, by_length = (statistics.median(seconds[filled]) for filled in (True, False))
        print(f"{name:10s} {filled_up:10.2f} {by_length:11.2f} {filled_up / by_length:7.2f}", flush=True)


def step(model: SequenceClassifier, tokens: torch.Tensor) -> float:
    """Seconds of a forward and a backward."""
    start = time.perf_counter()
    F.cross_entropy(model(tokens), torch.zeros(len(tokens), dtype=torch.long)).backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
