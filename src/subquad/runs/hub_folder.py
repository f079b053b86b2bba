"""A trained classifier as a folder of the Hugging Face hub: weights, what timm makes of them, and a model card."""

import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo

from subquad.errors import SubquadError, reason_of
from subquad.models import NETWORKS, VARIANTS, attention_label, restore_model, weight_file
from subquad.models.pretrained import HUB_CONFIG, HUB_WEIGHTS
from subquad.models.timm_settings import default_cfg
from subquad.reading import read_yaml
from subquad.runs.opened_networks import FOLDERS
from subquad.runs.run_records import Run, read_run
from subquad.tasks.class_names import all_named
from subquad.text import one_line, si
from subquad.weights.files import read_note, save_weights
from subquad.writing import WriteError, replacing, temporary_folder, write_json, write_text

CARD = "README.md"
TAG = "subquad"
"""What each of our cards has among its tags."""


def save_for_hf(source: Path | str, folder: Path | str) -> Path:
    """Write a trained classifier as a folder that `hf-hub:` and `local-dir:` names of timm's, and ours, stand for.

    Args:
        source: a run folder, whose best weights are taken, or a weight file that training wrote; or the folder of a
            conversion, of which timm can make nothing, and we can.
        folder: gets model.safetensors, README.md, the model card, and config.json, which a conversion has none of. What
            was written by this before is replaced.

    Returns:
        The folder.

    Raises:
        SubquadError: it is no classifier of images, or timm has no name for its host; or somebody else's files of these
            names are in the folder.
    """
    folder, path = Path(folder), Path(source)
    _check_ours(folder)
    for kind, module in FOLDERS.items():
        if (path / f"{kind}.json").is_file():
            weights, card = import_module(module).for_hub(path)
            _remove_config(folder)
            with replacing(folder / HUB_WEIGHTS) as aside:
                shutil.copyfile(weights, aside)
            write_text(folder / CARD, card)
            return folder
    file = weight_file(source)
    _check_trained_here(file)
    model: Any
    model, note = restore_model(file)
    run = read_run(file.parent) if (file.parent / "run.json").is_file() else None
    config = _config(model, note)
    _remove_config(folder)
    save_weights(model, folder / HUB_WEIGHTS, note)
    write_json(folder / HUB_CONFIG, config, indent=2)
    write_text(folder / CARD, _card(config, note, run, file))
    return folder


def _check_ours(folder: Path) -> None:
    """Raise where a folder holds files that would be written over, and that no upload wrote."""
    there = [name for name in (HUB_WEIGHTS, HUB_CONFIG, CARD) if (folder / name).exists()]
    if there and not _is_our_card(folder / CARD):
        raise SubquadError(
            f"{folder} has {' and '.join(there)} of somebody else, which would be written over: remove them, or name "
            "another folder"
        )


def _is_our_card(path: Path) -> bool:
    if not path.is_file():
        return False
    head = path.read_text(encoding="utf-8", errors="replace")[:1000]
    return any(line.startswith("tags:") and TAG in line for line in head.splitlines())


def _check_trained_here(file: Path) -> None:
    """Raise for weights that say nothing of their network, of which no card can be written."""
    if file.suffix == ".safetensors" and not read_note(file):
        raise SubquadError(
            f"{file} does not say which network it holds: what was trained or converted here is uploaded, a run "
            "folder, its weight file or the folder of a conversion"
        )


def _remove_config(folder: Path) -> None:
    """Remove what says of the weights that lay in a folder before what network they are of: others take their place.

    Raises:
        WriteError: the folder is not to be written to.
    """
    try:
        (folder / HUB_CONFIG).unlink(missing_ok=True)
    except OSError as error:
        raise WriteError(f"{folder / HUB_CONFIG} can't be written: {error.strerror}") from None


def upload(source: Path | str, repository: str, *, private: bool = False) -> str:
    """Put a trained classifier into a repository of the hub, which is made if it is not there; returns its link.

    Args:
        source: as for `save_for_hf`.
        repository: "owner/name"; the token is that of `hf auth login`, or HF_TOKEN.
        private: whether a new repository is shown to nobody else.

    Raises:
        SubquadError: the hub can't be reached, or refuses it, in one line.
    """
    from huggingface_hub import HfApi

    with temporary_folder("upload") as place:
        save_for_hf(source, place)
        try:
            api = HfApi(library_name="subquad")
            link = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=place, commit_message="Upload with subquad")
        except Exception as error:
            # its library has many, and those of the libraries below it
            reason = one_line(reason_of(error), 300).rstrip(".")
            raise SubquadError(
                f"{repository} can't be uploaded to: {reason}; `hf auth login` takes a token, and local-dir:FOLDER in "
                "the repository's place writes the same files to a folder"
            ) from None
    return str(link)


def _config(model: Any, note: dict[str, Any]) -> dict[str, Any]:
    """What timm makes the network of."""
    creation = dict(note["creation"])
    name, classes = creation.pop("name"), creation.pop("num_classes", 1000)
    architecture = name if name in NETWORKS else _row_of_size(name)
    if name not in NETWORKS:
        # the row names mechanisms of its own
        creation.setdefault("attention", "softmax")
    height, width = model.img_size
    creation["img_size"] = [height, width]
    seen = {key: note["input"][key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    size = {"input_size": [creation.get("in_chans", 3), height, width], "pool_size": None, "num_classes": classes}
    config = {"architecture": architecture, "num_classes": classes, "model_args": creation}
    # timm asks for a name by the number of an output
    imagenet = ImageNetInfo().label_names()
    config["label_names"] = all_named(note.get("classes") or (imagenet if classes == len(imagenet) else []), classes)
    return config | {"pretrained_cfg": {**default_cfg(architecture), "url": "", **size, **seen}}


def _row_of_size(size: str) -> str:
    """A row of the table that has a host's sizes and no settings of its own, as timm knows no sizes alone."""
    rows = [name for name, network in NETWORKS.items() if network.variant == size and not network.settings]
    if size not in VARIANTS or not rows:
        raise SubquadError(f"timm has no network of the size {size}: only those of `subquad list models` with a row")
    return rows[0]


def _card(config: dict[str, Any], note: dict[str, Any], run: Run | None, file: Path) -> str:
    """The model card: what the network is, its figures, recipe and command, and how it is opened."""
    creation = note["creation"]
    name, label = creation["name"], attention_label(creation["name"], creation.get("attention"))
    pixels = "×".join(map(str, config["pretrained_cfg"]["input_size"][1:]))
    about = f"`{name}` with {label} attention, {pixels} px, {config['num_classes']} classes"
    lines = ["---", "library_name: timm", "pipeline_tag: image-classification"]
    lines += ["tags: [image-classification, timm, subquad]", "---", f"# {name}", "", f"{about}, trained with subquad."]
    if run is not None:
        cost = ", ".join(f"{si(run.facts[key])} {key}" for key in ("params", "macs") if key in run.facts)
        lines += ["", "## Figures", "", "| data | top-1 % | top-5 % | epochs | |\n| --- | ---: | ---: | ---: | --- |"]
        top5 = f"{run.best('eval_top5'):.2f}" if "eval_top5" in run.rows[0] else ""
        lines += [f"| {run.facts.get('data')} | {run.best('eval_top1'):.2f} | {top5} | {len(run.rows)} | {cost} |"]
        lines += ["", "Best epoch on the held-out images, by which the weights were chosen."]
    lines += ["", "## Use", "", "```python", "import subquad, timm", ""]
    lines += ['model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True)']
    lines += ['trained = subquad.open_trained("hf-hub:OWNER/NAME")', "```"]
    if run is not None:
        recipe = (file.parent / "recipe.yaml").read_text(encoding="utf-8")
        read_yaml(file.parent / "recipe.yaml")
        lines += ["", "## Recipe", "", f"    {run.facts.get('command', '')}", "", "```yaml", recipe.strip(), "```"]
    return "\n".join([*lines, ""])
