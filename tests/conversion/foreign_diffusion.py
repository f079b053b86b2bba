"""Small transformers of diffusers with random weights, and what they are called with."""

import torch
from torch import nn

SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "patch_size": 2,
    "sample_size": 8,
}
OF_TEXT = {"joint_attention_dim": 24, "pooled_projection_dim": 12}


def dit():
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(**SIZES, out_channels=8, num_embeds_ada_norm=1000, norm_elementwise_affine=False)


def pixart():
    from diffusers import PixArtTransformer2DModel

    text = {"cross_attention_dim": 16, "caption_channels": 32, "use_additional_conditions": False}
    return PixArtTransformer2DModel(**SIZES, out_channels=8, **text)


def sd3(**more):
    from diffusers import SD3Transformer2DModel

    sizes = {"caption_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 16}
    return SD3Transformer2DModel(**SIZES, **OF_TEXT, **sizes, **more)


def sd35():
    """With norms of queries and keys, and a second attention of the image alone."""
    return sd3(qk_norm="rms_norm", dual_attention_layers=(0,))


def flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "axes_dims_rope": (2, 2, 4)}
    return FluxTransformer2DModel(patch_size=1, num_layers=1, num_single_layers=2, **sizes, **OF_TEXT)


# name: what makes it, and which latents it takes besides 8×8
DIFFUSION = {
    "DiT": (dit, [(12, 12), (6, 6)]),
    "PixArt": (pixart, [(12, 8), (4, 20)]),
    "SD3": (sd3, [(12, 8), (4, 20)]),
    "SD3.5": (sd35, [(12, 8), (4, 20)]),
    "Flux": (flux, [(12, 8), (4, 20)]),
}


def denoiser(name):
    """A network whose answers depend on all of its weights."""
    torch.manual_seed(0)
    model = DIFFUSION[name][0]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() < 2 else 0.2)
    return model.eval()


def inputs(name, height=8, width=8, text=5):
    """Arguments of a call for latents of this size and a text of so many tokens."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    timestep = torch.tensor([30, 500])
    if name == "DiT":
        return {"hidden_states": noise(2, 4, height, width), "timestep": timestep, "class_labels": timestep}
    if name == "PixArt":
        hidden, conditions = noise(2, 4, height, width), {"resolution": None, "aspect_ratio": None}
        texts = {"encoder_hidden_states": noise(2, text, 32), "added_cond_kwargs": conditions}
        return {"hidden_states": hidden, "timestep": timestep, **texts}
    texts = {"encoder_hidden_states": noise(2, text, 24), "pooled_projections": noise(2, 12)}
    if name != "Flux":
        return {"hidden_states": noise(2, 4, height, width), "timestep": timestep, **texts}
    rows, columns = height // 2, width // 2
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
    places = {"img_ids": ids.flatten(0, 1), "txt_ids": torch.zeros(text, 3)}
    return {"hidden_states": noise(2, rows * columns, 16), "timestep": timestep / 1000, **texts, **places}


def denoised(model, arguments):
    with torch.no_grad():
        return model(**arguments).sample
