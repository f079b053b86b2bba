"""Made-up weights and inputs, so that two implementations of one network can be compared without anyone's checkpoint.

The value of a checkpoint entry depends on its name and shape alone. With z standard normal (float64), drawn by
numpy's PCG64 seeded with crc32(name):

    ....running_var                 1 + 0.1 |z|
    ....weight, two dims or more    z / sqrt(prod(shape[1:]))
    ....weight, one dim             1 + 0.1 z
    anything else                   0.1 z

An entry of kind "kept" (integer tables, masks, counters) is what a network computes for itself.
"""

import zlib

import numpy as np
import torch


def _normal(name, shape):
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return np.asarray(generator.standard_normal(tuple(shape)), dtype=np.float64)


def make_tensor(name, shape):
    """Float64 value of the checkpoint entry `name`."""
    z = _normal(name, shape)
    if name.endswith("running_var"):
        z = 1 + 0.1 * np.abs(z)
    elif name.endswith("weight"):
        z = z / np.sqrt(np.prod(shape[1:])) if len(shape) >= 2 else 1 + 0.1 * z
    else:
        z = 0.1 * z
    return torch.from_numpy(np.array(z))


def make_input(shape, name="input"):
    """Float64 standard normal input."""
    return torch.from_numpy(np.array(_normal(name, shape)))


def make_state_dict(entries):
    """A golden's `state_dict` -> {name: float64 tensor} for the made entries."""
    return {name: make_tensor(name, entry["shape"]) for name, entry in entries.items() if entry["kind"] == "made"}
