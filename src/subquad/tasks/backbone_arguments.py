"""What a recipe says about its network, as arguments of `create_model`, and backbones made of them."""

from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.errors import SubquadError, naming
from subquad.large import chunk_blocks
from subquad.models import NETWORKS, VARIANTS, create_model, load_checkpoint
from subquad.models.backbone import Backbone
from subquad.models.pretrained import source_of
from subquad.tasks.conventions import IN_HOSTS, OWN
from subquad.tasks.image_recipe import ImageRecipe
from subquad.weights.files import fitted, read_note, read_weights, weight_file
from subquad.weights.fitting import stored_grids

DENSE_AGENTS = {"pvt": (12**2, 16**2, 28**2, 28**2), "swin": (9**2, 12**2, 14**2, 7**2)}
"""Agents of each stage in the dense networks of Agent Attention, by host; the tables are those of classification."""


_NOT_SETTINGS = frozenset({"name", "in_chans", "num_classes", "device", "dtype"})
"""Arguments of `create_model` that a recipe decides otherwise."""


def arguments_of(recipe: ImageRecipe, *others: str) -> dict[str, Any]:
    """Name, mechanism, sizes and settings of a recipe's network, without its classes.

    `others` are the arguments that the caller adds. Raises a SubquadError where settings name one of either.
    """
    given: dict[str, Any] = {
        "attention": recipe.attention,
        "img_size": recipe.img_size,
        "patch_size": recipe.patch_size,
        "embed_dim": recipe.embed_dim,
        "depths": None if recipe.depth is None else (recipe.depth,),
        "num_heads": recipe.num_heads,
        "drop_path_rate": recipe.drop_path,
    }
    arguments = {key: value for key, value in given.items() if value is not None}
    # a pyramid has several numbers of these, which only settings can hold
    own = given.keys() - {"depths", "num_heads"} | arguments.keys() | _NOT_SETTINGS | set(others)
    if twice := own & recipe.settings.keys():
        raise SubquadError(f"settings are those of the mechanism, {', '.join(sorted(twice))} is a field of the recipe")
    return {"name": recipe.model, **arguments, **recipe.settings}


def backbone_arguments(recipe: ImageRecipe, dense_agents: bool, conventions: str = OWN) -> dict[str, Any]:
    """What `build_backbone` makes a dense network's backbone of, under heads of some conventions."""
    arguments = arguments_of(recipe)
    network = NETWORKS.get(recipe.model)
    variant = VARIANTS.get(network.variant if network else recipe.model)
    if variant is not None:
        arguments = IN_HOSTS[conventions].get(variant.host, {}) | arguments
    if dense_agents and variant is not None:
        if variant.host not in DENSE_AGENTS:
            raise SubquadError(f"dense_agents are published for {' and '.join(DENSE_AGENTS)}, not for {variant.host}")
        arguments["pooled_agents"] = list(DENSE_AGENTS[variant.host])
    if recipe.initial_checkpoint:
        arguments["checkpoint"] = str(source_of(recipe.initial_checkpoint))
    return {**arguments, "grad_checkpointing": recipe.grad_checkpointing, "chunk_tokens": recipe.chunk_tokens}


def build_backbone(arguments: dict[str, Any]) -> Backbone:
    """A backbone without a classifier, with the weights that its entry `checkpoint` names.

    These are of a classifier, or of a network with a dense head, whose backbone is taken.
    """
    arguments = {**arguments, "num_classes": 0}
    checkpoint, checkpointing = arguments.pop("checkpoint", None), arguments.pop("grad_checkpointing", False)
    chunk_tokens = arguments.pop("chunk_tokens", None)
    network = create_model(**arguments)
    if checkpoint:
        file = weight_file(checkpoint)
        if "backbone" in ((note := read_note(file)).get("creation") or {}):
            with naming(file):
                state, grids = _backbone_in(file, network), stored_grids(note, network, "the state dict")
                network.load_state_dict(fitted(state, network, "the state dict", head=False, grids=grids).state)
        else:
            load_checkpoint(network, file, head=False)
    if checkpointing:
        network.set_grad_checkpointing()
    if chunk_tokens is not None:
        chunk_blocks(network, chunk_tokens)
    return network


def _backbone_in(file: Path, network: Backbone) -> dict[str, Tensor]:
    """The backbone's entries of a dense network's file; the last norm, which no map goes through, is not among them."""
    within = "pyramid.backbone."
    state, own = read_weights(file)[0], network.state_dict()
    norm = {name: tensor for name, tensor in own.items() if name.startswith("norm.")}
    return norm | {name.partition(within)[2]: tensor for name, tensor in state.items() if within in name}
