"""MLPs of many tokens in chunks: what is hidden in them is computed again in the backward pass, and never all there."""

import inspect

import torch
from torch import Tensor

from subquad.besides import Besides, Network, class_besides
from subquad.errors import SubquadError
from subquad.models.computed_again import computed_again
from subquad.models.layers import Block
from subquad.ranges import checks_arguments


@checks_arguments
def chunk_mlps(model: Network, most_tokens: int = 8192) -> Network:
    """Let the MLPs of a network's blocks take at most so many tokens of an image at a time, in place.

    Results and gradients stay what they are. MLPs that look at the map (PVTv2's, MAViT's, H-ViT³'s) stay whole.

    Args:
        model: a network of `create_model`.
        most_tokens: of a chunk.

    Returns:
        The network.

    Raises:
        SubquadError: for chunks of no tokens, and where no MLP can be chunked.
    """
    if most_tokens < 1:
        raise SubquadError(f"a chunk has at least one token, got most_tokens={most_tokens}")
    mlps = [module.mlp for module in model.modules() if isinstance(module, Block)]
    mlps = [mlp for mlp in mlps if list(inspect.signature(type(mlp).forward).parameters) == ["self", "x"]]
    if not mlps:
        raise SubquadError(f"{type(model).__name__} has no MLP that looks at one token at a time: leave it whole")
    for mlp in mlps:
        cls = type(mlp)
        own = cls.__bases__[1] if issubclass(cls, _Chunked) else cls
        mlp.__class__ = class_besides(_Chunked, own, cls.__name__, most_tokens=most_tokens)
    return model


class _Chunked(Besides):
    """What an MLP is besides its own class while it takes chunks."""

    most_tokens: int

    def forward(self, x: Tensor) -> Tensor:
        """(b, n, c) to (b, n, c)."""
        whole = super().forward
        if x.shape[1] <= self.most_tokens:
            return whole(x)
        chunks = x.split(self.most_tokens, dim=1)
        if not torch.is_grad_enabled():
            return torch.cat([whole(chunk) for chunk in chunks], dim=1)
        return torch.cat([computed_again(self, whole, chunk) for chunk in chunks], dim=1)
