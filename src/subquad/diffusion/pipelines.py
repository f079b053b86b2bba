"""Images of a pipeline of diffusers: it is loaded without running anyone's code, and makes one image of one noise."""

import inspect
import json
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from subquad.errors import SubquadError, shown
from subquad.weights.hub_access import asking_hub


@dataclass(frozen=True)
class Sampling:
    """How images are made; what is None is left to the pipeline.

    Attributes:
        steps: of denoising.
        guidance_scale: how strongly the prompt is followed; 1 is without guidance.
        height, width: of the image, in pixels.
        negative_prompt: what is to be avoided.
    """

    steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    negative_prompt: str | None = None


ARGUMENTS = {"steps": "num_inference_steps"}
"""Fields of Sampling that pipelines call by another name."""

IMAGES = ("image", "mask_image", "control_image")
"""What image-to-image, inpainting and ControlNet pipelines are given beside prompts."""


def load_pipeline(model: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """A pipeline from a folder or by its name on a hub; only safetensors are read, and no code of its own is run."""
    try:
        from diffusers.utils import logging
        from transformers.utils import logging as logging_of_texts
    except ImportError:
        raise SubquadError("diffusers is not installed: pip install 'subquad[diffusion]'") from None
    is_folder = Path(model).is_dir()
    if is_folder:
        _check_folder(Path(model))
    elif Path(model).exists():
        raise SubquadError(f"{model} is no folder: name the one of a pipeline, which has a model_index.json")
    if not is_folder and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        raise SubquadError(f"no pipeline at {model}: neither a folder, nor a name like owner/model")
    # of loading; what is said of prompts and images (a text that is cut short, a picture made black) is for users
    libraries = (logging, logging_of_texts)
    before = [library.get_verbosity() for library in libraries]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for library in libraries:
                library.set_verbosity_error()
            # which warns of other packages' versions where it is imported
            from diffusers import DiffusionPipeline

            with nullcontext() if is_folder else asking_hub():
                pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype, use_safetensors=True)
    except Exception as error:
        # libraries have as many kinds of errors as there are ways for files to be damaged
        what = "can't be loaded" if is_folder else "is no folder here, and can't be loaded from the hub"
        raise SubquadError(f"{model} {what}: {_first_line(error)}") from None
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
    _check_texts(pipe)
    return pipe.to(device)


def _check_texts(pipe: Any) -> None:
    """Raise where a pipeline has nothing that reads prompts, as where it was saved without, to be given embeddings."""
    parts = getattr(pipe, "components", {})
    for kind in ("text_encoder", "tokenizer"):
        there = [part for name, part in parts.items() if name.startswith(kind)]
        if there and all(part is None for part in there):
            raise SubquadError(
                f"{type(pipe).__name__} was saved without its {kind}, which reads prompts: save it with one"
            )


def weights_in(pipe: Any) -> str:
    """A few digits that pipelines with other weights do not have."""
    total = torch.zeros((), dtype=torch.float64)
    networks = (part for _, part in sorted(pipe.components.items()) if isinstance(part, torch.nn.Module))
    tensors = (tensor for network in networks for tensor in network.parameters())
    for place, tensor in enumerate(tensors, start=1):
        if tensor.numel():
            total += place * float(tensor.detach().abs().mean(dtype=torch.float32))
    return f"{float(total):.8g}"


def _check_folder(folder: Path) -> None:
    """Raise where a folder has no pipeline, or lacks a part that its index speaks of: loaders make an empty one."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise SubquadError(f"no pipeline of diffusers in {folder}: it has no model_index.json")
    try:
        parts = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        parts = None
    if not isinstance(parts, dict) or not isinstance(parts.get("_class_name"), str | list):
        raise SubquadError(f"{index} is damaged: it names no class of diffusers")
    needed = [name for name, kind in parts.items() if isinstance(kind, list) and len(kind) == 2 and kind[1]]
    missing = [name for name in needed if not name.startswith("_") and not (folder / name).is_dir()]
    if missing:
        raise SubquadError(f"{folder} has no {' and no '.join(missing)}, of which its model_index.json speaks")


def make_image(pipe: Any, prompt: str, seed: int, sampling: Sampling, **more: Any) -> Image.Image:
    """One image of the noise that `seed` stands for, the same on all devices.

    Args:
        pipe: a pipeline of diffusers that makes images of texts or, as DiT does, of the names or numbers of classes.
        prompt: what to show.
        seed: of the noise, and of what is drawn beside it.
        sampling: how.
        more: further arguments of the pipeline.

    Raises:
        SubquadError: the pipeline does not take what is given, or the image would be black: its safety checker made it
            so, or it is of numbers that are not finite.
    """
    taken = inspect.signature(pipe.__call__).parameters
    arguments = check_asked(pipe, prompt, sampling)
    generator = torch.Generator().manual_seed(seed)
    # numbers, as an image does not tell those that are none from black; a few pipelines put a mark into images alone
    if "output_type" in taken and not hasattr(pipe, "watermarker"):
        more = {"output_type": "np", **more}
    try:
        # what is drawn beside the noise, as which tokens others are merged into, comes of the same seed
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = pipe(**_condition(pipe, prompt, taken), **arguments, generator=generator, **more)
    except SubquadError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        wanted = [name for name in IMAGES if name in taken and name not in more]
        if wanted:
            raise SubquadError(_wants_images(pipe, wanted, error)) from None
        if not isinstance(error, ValueError):
            raise
        raise SubquadError(f"{type(pipe).__name__}: {_first_line(error)}") from None
    if any(getattr(made, "nsfw_content_detected", None) or ()):
        raise SubquadError(
            f"the safety checker of {type(pipe).__name__} made the image of {shown(prompt)} and seed {seed} black, "
            "which compares with none: take another prompt or seed"
        )
    return _image_of(pipe, made.images[0], f"{shown(prompt)} and seed {seed}")


def check_asked(pipe: Any, prompt: str, sampling: Sampling) -> dict[str, Any]:
    """What is asked of a pipeline, by its own names.

    Raises:
        SubquadError: it does not take it, or would pass it over.
    """
    taken = inspect.signature(pipe.__call__).parameters
    arguments = {ARGUMENTS.get(key, key): value for key, value in vars(sampling).items() if value is not None}
    unknown = [name for name in arguments if name not in taken]
    if unknown:
        raise SubquadError(f"{type(pipe).__name__} takes no {' and no '.join(unknown)}: leave it out")
    _check_negative_prompt(pipe, arguments, taken)
    _condition(pipe, prompt, taken)
    return arguments | _other_side(pipe, arguments)


def _wants_images(pipe: Any, names: list[str], error: Exception) -> str:
    return (
        f"{type(pipe).__name__} takes {' and '.join(names)} beside a prompt, and only prompts are given here "
        f"({shown(_first_line(error))}): apply_agent_attention(pipe) in Python, and call it with images"
    )


def _image_of(pipe: Any, made: Any, what: str) -> Any:
    if not isinstance(made, np.ndarray):
        return made
    if not np.isfinite(made).all():
        raise SubquadError(
            f"{type(pipe).__name__} made numbers of {what} that are not finite, which are black in an image: take "
            "another dtype, as bf16 or fp32, or other settings"
        )
    return pipe.numpy_to_pil(made)[0]


def _check_negative_prompt(pipe: Any, arguments: dict[str, Any], taken: Any) -> None:
    """Raise where what is to be avoided would be passed over without a word, as pipelines do without guidance."""
    if "negative_prompt" not in arguments:
        return
    # guidance that was trained into a network, as Flux's, knows no negative prompt
    name = "true_cfg_scale" if "true_cfg_scale" in taken else "guidance_scale"
    scale = taken[name].default if name == "true_cfg_scale" else arguments.get(name)
    if scale is not None and scale <= 1:
        raise SubquadError(
            f"negative_prompt changes nothing in {type(pipe).__name__} with {name}={scale:g}: it takes guidance above "
            "1, or leave it out"
        )


def _other_side(pipe: Any, arguments: dict[str, Any]) -> dict[str, int]:
    """The pipeline's own height or width, where the other alone is given: Stable Diffusion's drops a single one."""
    given = [side for side in ("height", "width") if side in arguments]
    if len(given) != 1:
        return {}
    other, place = ("width", 1) if given == ["height"] else ("height", 0)
    network = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
    size = getattr(pipe, "default_sample_size", None) or getattr(getattr(network, "config", None), "sample_size", None)
    factor = getattr(pipe, "vae_scale_factor", None)
    if size is None or factor is None:
        raise SubquadError(f"{type(pipe).__name__} does not say its own {other}: give {other} beside {given[0]}")
    return {other: (size if isinstance(size, int) else size[place]) * factor}


def _condition(pipe: Any, prompt: str, taken: Any) -> dict[str, Any]:
    if "prompt" in taken:
        return {"prompt": prompt}
    if "class_labels" not in taken:
        raise SubquadError(f"{type(pipe).__name__} makes images neither of texts nor of classes")
    label = int(prompt) if prompt.isdecimal() else getattr(pipe, "labels", {}).get(prompt)
    # the row behind the classes stands for none of them
    count = getattr(pipe.transformer.config, "num_embeds_ada_norm", None)
    if label is None or (count is not None and label >= count):
        numbers = "" if count is None else f" from 0 to {count - 1}"
        raise SubquadError(
            f"{shown(prompt)} is no class of {type(pipe).__name__}: give its number{numbers}, or its ImageNet name"
        )
    return {"class_labels": [label]}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
