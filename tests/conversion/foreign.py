"""Small foreign networks with random weights, one or more for each family that can be converted."""

import copy
import threading
from functools import partial

import pytest
import timm
import torch
from torch import nn

import subquad

TINY = {"embed_dim": 48, "depth": 2, "num_heads": 4}
IN_TRANSFORMERS = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 64,
    "patch_size": 16,
}


def timms(name, size=64, **arguments):
    """One of timm's, for images of any size."""
    arguments = {"dynamic_img_size": True, "num_classes": 5} | TINY | arguments
    return timm.create_model(name, img_size=size, **arguments)


def timms_sam():
    sizes = {"depth": 3, "global_attn_indexes": (1,), "window_size": 3, "neck_chans": 16}
    return timm.create_model("samvit_base_patch16", img_size=64, **TINY | sizes)


def timms_swin():
    """Windows of 4×4, shifted in every second block; maps of 16×16 and 8×8."""
    sizes = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "strict_img_size": False}
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=5, **sizes)


def our_pyramid(name, **sizes):
    sizes = {"depths": (1, 1), "num_heads": (2, 4), "num_classes": 5, "img_size": 64} | sizes
    return subquad.create_model(name, **sizes)


def torchvisions():
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 2, 4, 48, 96, num_classes=5)


def of_transformers(model, config, **arguments):
    import transformers

    if not hasattr(transformers, model):
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    return getattr(transformers, model)(getattr(transformers, config)(**IN_TRANSFORMERS | arguments))


def sam_of_transformers():
    arguments = {"num_hidden_layers": 3, "mlp_dim": 96, "output_channels": 16, "global_attn_indexes": [1]}
    return of_transformers("SamVisionModel", "SamVisionConfig", window_size=3, **arguments)


class Plain(nn.Module):
    """Somebody's own network, of PyTorch's layers alone."""

    image_size = 64

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 48, 16, stride=16)
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(self.patches(x).flatten(2).mT)


# name: what makes it, and whether images of other sizes than 64 px go through it as they are
FOREIGN = {
    "timm ViT": (partial(timms, "vit_tiny_patch16_224", qk_norm=True, init_values=0.5), True),
    "timm DeiT, distilled": (partial(timms, "deit_tiny_distilled_patch16_224"), True),
    "timm DINOv2 with registers": (partial(timms, "vit_small_patch14_reg4_dinov2", 56), True),
    "timm EVA-02": (partial(timms, "eva02_tiny_patch14_224", 56), True),
    "timm DINOv3": (partial(timms, "vit_small_patch16_dinov3"), True),
    "timm SigLIP": (partial(timms, "vit_base_patch16_siglip_224"), True),
    "timm SAM": (timms_sam, False),
    "timm Swin": (timms_swin, True),
    "torchvision ViT": (torchvisions, False),
    "torch encoder": (Plain, True),
    "transformers ViT": (partial(of_transformers, "ViTForImageClassification", "ViTConfig"), False),
    "transformers DeiT": (partial(of_transformers, "DeiTModel", "DeiTConfig"), False),
    "transformers DINOv2": (partial(of_transformers, "Dinov2Model", "Dinov2Config"), True),
    "transformers DINOv2 with registers": (
        partial(of_transformers, "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        True,
    ),
    "transformers DINOv3": (partial(of_transformers, "DINOv3ViTModel", "DINOv3ViTConfig"), True),
    "transformers I-JEPA": (partial(of_transformers, "IJepaModel", "IJepaConfig"), False),
    "transformers SigLIP": (partial(of_transformers, "SiglipVisionModel", "SiglipVisionConfig"), False),
    "transformers CLIP": (partial(of_transformers, "CLIPVisionModel", "CLIPVisionConfig"), False),
    "transformers SAM": (sam_of_transformers, False),
    "our DeiT": (
        partial(subquad.create_model, "deit_tiny", img_size=64, embed_dim=48, depths=(2,), num_heads=4, num_classes=5),
        True,
    ),
    "our Swin": (partial(our_pyramid, "swin_tiny", depths=(2, 1), embed_dim=24, window_size=4), True),
    "our PVT": (partial(our_pyramid, "pvt_tiny", embed_dims=(24, 48), mlp_ratios=(2, 2)), True),
    "our PVTv2": (partial(our_pyramid, "pvt_v2_b1", embed_dims=(24, 48), mlp_ratios=(2, 2)), True),
    "our CSwin": (partial(our_pyramid, "cswin_tiny", embed_dim=24, split_size=4), True),
    "our MAViT": (partial(our_pyramid, "mavit_tiny", embed_dims=(24, 48), head_width=40, mlp_ratio=2), True),
    "our DINOv3": (
        partial(subquad.create_model, "dinov3_small", img_size=64, embed_dim=48, depths=(2,), num_heads=4),
        True,
    ),
}


def draw(model):
    """Weights that all matter; those of norms stay near one, without which all keys would be seen alike."""
    for parameter in model.parameters():
        usual = float(parameter.dim() < 2 and bool((parameter == 1).all()))
        nn.init.normal_(parameter, usual, 0.15 if parameter.dim() < 2 else 0.1)


def teacher(name):
    """A network of this family whose answers depend on all of its weights."""
    torch.manual_seed(0)
    model = FOREIGN[name][0]()
    draw(model)
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        # of which several in a row would leave nothing of an image
        nn.init.ones_(norm.weight)
    return model.eval()


def has_prefix(name):
    """Whether a network of this family has class tokens, or others in front of its map."""
    return not any(
        word in name
        for word in (
            *("SAM", "SigLIP", "Swin", "PVT", "MAViT", "I-JEPA", "torch encoder", "AIMv2"),
            *(
                "CAFormer",
                "SegFormer",
                "Hiera",
                "MiT of",
                "MONAI",
                "SimpleViT",
                "GLPN",
                "Idefics",
                "SmolVLM",
                "Janus",
                "Qwen",
                "GLM",
            ),
        )
    )


def sharp(name):
    """A teacher whose queries choose among the keys: fresh ones attend to all alike, which InLine does as well."""
    model = teacher(name)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(parameter, 1.5)
        elif any(part in name for part in ("qkv.weight", "q_proj.weight", "k_proj.weight")):
            nn.init.normal_(parameter, std=0.5)
    return model


def answer(model, images):
    """The first thing that a network answers."""
    with torch.no_grad():
        answered = model(images)
    return answered if isinstance(answered, torch.Tensor) else answered[0]


class Answer(nn.Module):
    """A network that answers with the first thing alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        answered = self.model(x)
        return answered if isinstance(answered, torch.Tensor) else answered[0]


def with_other_weights(model, x):
    """The answers of a network that is called with other weights, and of one that has them."""
    other = {name: 0.5 * parameter.detach() for name, parameter in model.named_parameters()}
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(other, strict=False)
    return answer(partial(torch.func.functional_call, model, other), x), answer(loaded, x)


def answers_at_once(student, calls, answer, embedded=1):
    """What a student answers to calls of a thread each, none of which goes on before all have embedded their image.

    `embedded` is how often a call goes through the embedding.
    """
    all_of_them, heard, answers = threading.Barrier(len(calls)), threading.local(), [None] * len(calls)

    def wait(*called):
        heard.times = getattr(heard, "times", 0) + 1
        if heard.times == embedded:
            all_of_them.wait(60)

    def call(number):
        answers[number] = answer(student, calls[number])

    student.get_submodule(student.subquad_conversion.embedding).register_forward_hook(wait)
    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def difference(one, other):
    return ((one - other).norm() / other.norm()).item()


def images(size=64, width=None, number=2):
    return torch.randn(number, 3, size, width or size, generator=torch.Generator().manual_seed(0))


def side_of(name):
    """Pixels on a side that a network of this family is made for."""
    return 56 if "EVA" in name or name == "timm DINOv2 with registers" else 64
