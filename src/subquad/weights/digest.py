"""A digest of weights, kept in the metadata of our files: a flipped bit is found when they are read."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError

DIGEST = "subquad_digest"
"""The key of the metadata that holds it."""


def check_plain(tensors: Mapping[str, Any]) -> None:
    """Raise SubquadError where an entry is no tensor whose numbers lie in memory as they are."""
    for name, tensor in tensors.items():
        # what PyTorch asks of tensors that wrap others: quantized ones of torchao, sharded ones
        if not isinstance(tensor, Tensor) or hasattr(type(tensor), "__tensor_flatten__"):
            raise SubquadError(
                f"{name} is no plain tensor but a {type(tensor).__name__}, as in quantized or sharded networks: "
                "convert, restore and save a network before it is quantized or sharded"
            )


def digest_of(tensors: Mapping[str, Tensor], note: str) -> str:
    """SHA-256 of names, types, shapes and numbers, and of the `note` that stands beside them."""
    check_plain(tensors)
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
