"""What the powers of a trained PolaFormer do to its entropy: as they are, and with others put in their place.

python scripts/findings.py RUN [--count 256]
"""

import argparse
from pathlib import Path

import torch

from subquad.analysis import measure_network
from subquad.attention import PolaAttention
from subquad.runs import open_trained
from subquad.tasks.classification import images_of


def main() -> None:
    """Print the entropy of every layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder of a classifier with pola attention")
    parser.add_argument("--count", type=int, default=256, help="held-out images")
    arguments = parser.parse_args()
    trained = open_trained(arguments.run)
    images = images_of(trained)
    step = max(1, len(images) // arguments.count)
    pairs = [images[k] for k in range(0, len(images), step)]
    batches = torch.stack([pair[0] for pair in pairs if pair is not None][: arguments.count]).split(32)
    layers = [module for module in trained.model.modules() if isinstance(module, PolaAttention)]
    learned = torch.cat([layer.powers().flatten() for layer in layers])
    print(f"learned powers: mean {learned.mean():.2f}, from {learned.min():.2f} to {learned.max():.2f}")
    kept = [layer.powers for layer in layers]
    for power in (None, 1.0, 3.0, 5.0):
        for layer, own in zip(layers, kept, strict=True):
            layer.powers = own if power is None else lambda own=own, power=power: torch.full_like(own(), power)
        rows = measure_network(trained.model, batches, ["entropy"])
        values = " ".join(f"{row.mean:.3f}" for row in rows if row.head == 0)
        print(f"entropy of ln N by layer, powers {'as learned' if power is None else f'{power:g}'}: {values}")


if __name__ == "__main__":
    main()
