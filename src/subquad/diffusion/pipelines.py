"""Images of a pipeline of diffusers: it is loaded without running anyone's code, and makes one image of one noise."""

import inspect
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from subquad.errors import SubquadError, shown


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


def load_pipeline(model: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """A pipeline from a folder or by its name on a hub; only safetensors are read, and no code of its own is run."""
    try:
        from diffusers import DiffusionPipeline
        from diffusers.utils import logging
        from transformers.utils import logging as logging_of_texts
    except ImportError:
        raise SubquadError("diffusers is not installed: pip install 'subquad[diffusion]'") from None
    is_folder = Path(model).is_dir()
    if is_folder and not (Path(model) / "model_index.json").is_file():
        raise SubquadError(f"no pipeline of diffusers in {model}: it has no model_index.json")
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
            pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype, use_safetensors=True)
    except (OSError, ValueError, ImportError) as error:
        raise SubquadError(f"{model} can't be loaded: {_first_line(error)}") from None
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
    return pipe.to(device)


def make_image(pipe: Any, prompt: str, seed: int, sampling: Sampling, **more: Any) -> Image.Image:
    """One image of the noise that `seed` stands for, the same on all devices.

    Args:
        pipe: a pipeline of diffusers that makes images of texts or, as DiT does, of the names or numbers of classes.
        prompt: what to show.
        seed: of the noise.
        sampling: how.
        more: further arguments of the pipeline.

    Raises:
        SubquadError: the pipeline does not take what is given, or its safety checker made the image black.
    """
    taken = inspect.signature(pipe.__call__).parameters
    arguments = {ARGUMENTS.get(key, key): value for key, value in vars(sampling).items() if value is not None}
    unknown = [name for name in arguments if name not in taken]
    if unknown:
        raise SubquadError(f"{type(pipe).__name__} takes no {' and no '.join(unknown)}: leave it out")
    _check_negative_prompt(pipe, arguments, taken)
    arguments |= _other_side(pipe, arguments)
    generator = torch.Generator().manual_seed(seed)
    try:
        made = pipe(**_condition(pipe, prompt, taken), **arguments, generator=generator, **more)
    except SubquadError:
        raise
    except ValueError as error:
        raise SubquadError(f"{type(pipe).__name__}: {_first_line(error)}") from None
    if any(getattr(made, "nsfw_content_detected", None) or ()):
        raise SubquadError(
            f"the safety checker of {type(pipe).__name__} made the image of {shown(prompt)} and seed {seed} black, "
            "which compares with none: take another prompt or seed"
        )
    return made.images[0]


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
