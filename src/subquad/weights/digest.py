"""A digest of weights, kept in the metadata of our files: a flipped bit is found when they are read."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from subquad.errors import SubquadError

DIGEST = "subquad_digest"
"""The key of the metadata that holds it."""


def digest_of(tensors: Mapping[str, Tensor], note: str) -> str:
    """SHA-256 of names, types, shapes and numbers, and of the `note` that stands beside them."""
    digest = hashlib.sha256(note.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_digest(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Raise where a file is not what `save_weights` wrote; others, and those of earlier versions, have no digest."""
    if DIGEST in metadata and metadata[DIGEST] != digest_of(tensors, metadata.get("subquad", "")):
        raise SubquadError(f"{path} is damaged, or was changed after it was written: its digest does not fit")
