"""Files of detectors and segmenters as their authors' trainers write them, for networks of any size.

The names of a head's entries are those of the goldens.
"""

import io
import json
from collections import OrderedDict
from pathlib import Path

import torch
from released_layouts import released_state

from subquad.weights.released_heads import ANCHORS, PLACES, name_in_network

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_entries(head):
    """The entries of the smallest released network with a head: shapes by name."""
    record = json.loads((GOLDEN / f"dense_{head}.json").read_text())
    return {name: entry["shape"] for name, entry in record["state_dict"].items()}


def released_network(link, state):
    """The entries of the authors' file for a link, from a state dict of ours."""
    within = f"{PLACES[link.head]['pyramid']}"
    backbone = {
        name.removeprefix(f"{within}backbone."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{within}backbone.")
    }
    found = {f"backbone.{name}": tensor for name, tensor in released_state(link.network, backbone).items()}
    for name, tensor in state.items():
        if name.startswith(f"{within}norms."):
            found[f"backbone.norm{name.removeprefix(f'{within}norms.')}"] = tensor
    for name in golden_entries(link.head):
        if not name.startswith("backbone."):
            found[name] = _without_background(name, state[name_in_network(name, link.head)])
    return found


def _without_background(name, rows):
    if ".fc_cls." in name:
        return torch.cat([rows[1:], rows[:1]])
    if ".fc_reg." in name:
        return rows[4:]
    if ".conv_logits." in name:
        return rows[1:]
    if ".retina_cls." in name:
        return rows.unflatten(0, (ANCHORS, -1))[:, 1:].flatten(0, 1)
    return rows


class HistoryBuffer:
    """Stands for an object of the trainer's, which its checkpoints hold."""

    def __init__(self):
        self.values, self.hook = [0.5, 0.25], max


def pickled(link, state):
    """A checkpoint as mmcv's runner writes it, its configuration, optimizer and messages included."""
    meta = {"CLASSES": ("person", "bicycle"), "PALETTE": [[120, 120, 120]], "epoch": 12, "iter": 87960}
    meta |= {"config": f"model = dict(type='{link.head}')\n", "mmdet_version": "2.25.2", "time": "Mon", "seed": 0}
    meta |= {"hook_msgs": {"best_score": 0.414, "history": HistoryBuffer()}, "env_info": "sys.platform: linux"}
    optimizer = {"state": {0: {"step": 7, "exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    file = io.BytesIO()
    torch.save({"meta": meta, "state_dict": OrderedDict(state), "optimizer": optimizer}, file)
    return file.getvalue()
