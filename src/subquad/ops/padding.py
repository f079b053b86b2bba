"""Keys that are not there: what every sum over tokens needs to leave them out."""

from torch import Tensor


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """`x` (b, h, n, d) with zeros where `padding` (b, n) is True."""
    return x if padding is None else x.masked_fill(padding[:, None, :, None], 0)


def count_tokens(x: Tensor, padding: Tensor | None) -> Tensor | int:
    """How many tokens of `x` (b, h, n, d) are there: n, or (b, 1, 1, 1) where it differs by image; at least 1."""
    if padding is None:
        return x.shape[-2]
    return (~padding).sum(dim=-1).clamp(min=1).to(x.dtype)[:, None, None, None]


def mean_token(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over the tokens that are there: (b, h, n, d) -> (b, h, 1, d)."""
    return zero_padding(x, padding).sum(dim=-2, keepdim=True) / count_tokens(x, padding)
