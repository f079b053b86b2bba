"""Files of a repository of the Hugging Face hub whose names were not known beforehand: listed, and matched by name."""

import json
import os
import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from subquad.errors import SubquadError
from subquad.text import one_line
from subquad.weights.web_requests import read_small

HUB = "https://huggingface.co"
"""Where the hub is, unless HF_ENDPOINT says otherwise, as for the hub's own tools."""

SIZES = {"t": "tiny", "s": "small", "m": "medium", "l": "large", "b": "base"}
ENDINGS = (".pth", ".pt", ".bin", ".tar", ".safetensors")
DENSE = re.compile(r"rcnn|retina|upernet|fpn|coco|ade20k|detect|segment")
"""By what names of detectors and segmenters are told from those of classifiers."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its link, and its SHA-256 where the hub says it."""

    url: str
    path: str
    sha256: str | None


def hub_file(repository: str, network: str) -> HubFile:
    """The file of a network in a repository, by the host, size and resolution in its name.

    Args:
        repository: its link on the hub.
        network: as ours are called, "pola_swin_base_384".

    Raises:
        SubquadError: the repository can't be listed, or not one file of it has a name that fits.
    """
    base, name = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/"), urlsplit(repository).path.strip("/")
    listing = read_small(f"{base}/api/models/{name}/tree/main?recursive=true")
    try:
        entries = [entry for entry in json.loads(listing) if entry["type"] == "file"]
        files = {str(entry["path"]): (entry.get("lfs") or {}).get("oid") for entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SubquadError(f"{base} gives no listing of {name}") from None
    fitting = [path for path in files if fits(path, network)]
    if len(fitting) != 1:
        shown = one_line(", ".join(sorted(fitting or files)) or "none", 300)
        which = "several files" if fitting else "no file"
        raise SubquadError(f"{repository} has {which} of {network} by name: {shown}")
    digest = files[fitting[0]]
    known = digest if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) else None
    return HubFile(f"{base}/{name}/resolve/main/{quote(fitting[0])}", fitting[0], known)


def fits(path: str, network: str) -> bool:
    """Whether a file is called as a network may be: "PVT/pola_pvt_t.pth" is of "pola_pvt_tiny"."""
    words, low = network.split("_"), path.lower()
    named = r"(pvt|swin|mavit|mala)[^a-z0-9]*(tiny|small|medium|large|base|[tsmlb])(?![a-z])"
    match = re.search(named, low.rpartition("/")[2])
    if not low.endswith(ENDINGS) or DENSE.search(low) or match is None:
        return False
    size = SIZES.get(match[2], match[2])
    # the authors call PVT's large one b, as the papers' code does
    size = "large" if match[1] == "pvt" and size == "base" else size
    host = {"mavit": "mala"}.get(match[1], match[1])
    return [host, size] == [word for word in words if word != "384"][-2:] and ("384" in low) == ("384" in words)
