"""Detectors and segmenters as the released files describe them, and what their goldens were recorded with."""

from made_weights import make_input, make_state_dict

BACKBONES = {
    "pvt": {"pooled_agents": [144, 256, 784, 784], "drop_remainder": True},
    "swin": {"pooled_agents": [81, 144, 196, 49], "fixed_windows": True},
}


def backbone(name):
    """Arguments of a released backbone, by its name in the table."""
    return {"name": name, **BACKBONES[name.split("_")[1]]}


def state_of(record):
    """A golden's weights: made, then scaled, then shifted."""
    state = make_state_dict(record["state_dict"])
    for change, factors in (("mul", record.get("scaled", {})), ("add", record.get("shifted", {}))):
        for ending, factor in factors.items():
            for key in state:
                if key.endswith(ending):
                    state[key] = getattr(state[key], change)(factor)
    return state


def input_of(record):
    """A golden's image (1, 3, y, x), resized and normed; nothing beyond what is image."""
    x = make_input(record["input_shape"])
    height, width = record["image"]["img_shape"]
    x[..., height:, :], x[..., width:] = 0, 0
    return x
