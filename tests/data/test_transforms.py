"""From pictures to tensors: sizes, what is kept of an image, what chance may change."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.data import InputConfig, eval_transform, train_transform
from subquad.errors import SubquadError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@dataclass(frozen=True)
class Changes:
    """No augmentation at all, unless told."""

    no_aug: bool = False
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    train_interpolation: str = "bicubic"
    crop_padding: int = 0
    hflip: float = 0.0
    rotation: float = 0.0
    color_jitter: float = 0.0
    aa: str | None = None
    reprob: float = 0.0
    remode: str = "pixel"


EVERYTHING = Changes(
    scale=(0.3, 1.0),
    crop_padding=2,
    hflip=0.5,
    rotation=20.0,
    color_jitter=0.4,
    aa="rand-m9-mstd0.5-inc1",
    reprob=1.0,
    train_interpolation="random",
)


def noise(width, height):
    """A picture without two equal pixels beside each other."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def seeded(transform, image, seed=0):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (timm draws from it)
    torch.manual_seed(seed)
    return transform(image)


@pytest.mark.parametrize("img_size", [(24, 32), (32, 24), (32, 32)])
@pytest.mark.parametrize("crop_mode", ["squash", "center", "border"])
@pytest.mark.parametrize("size", [(40, 30), (8, 8), (17, 90)])
def test_images_of_any_size_come_out_as_asked(img_size, crop_mode, size):
    config = InputConfig(img_size, crop_mode=crop_mode, crop_pct=0.875)
    assert eval_transform(config)(noise(*size)).shape == (3, *img_size)
    for recipe in (Changes(), EVERYTHING, Changes(no_aug=True)):
        assert seeded(train_transform(config, recipe), noise(*size)).shape == (3, *img_size)


def test_an_image_of_the_right_size_is_only_normalised():
    image = noise(12, 8)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    config = InputConfig((8, 12), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    wanted = (pixels - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]
    torch.testing.assert_close(eval_transform(config)(image), wanted)
    torch.testing.assert_close(train_transform(config, Changes())(image), wanted)
    torch.testing.assert_close(train_transform(config, replace(EVERYTHING, no_aug=True))(image), wanted)


def test_without_a_scale_training_sees_what_evaluation_sees():
    config = InputConfig((16, 16), crop_pct=0.875)
    image = noise(40, 20)
    assert torch.equal(train_transform(config, Changes())(image), eval_transform(config)(image))


def test_squash_keeps_the_whole_width_and_center_does_not():
    image = np.zeros((16, 32, 3), np.uint8)
    image[:, :4] = 255
    whole, middle = (
        eval_transform(InputConfig((16, 16), crop_mode=mode, **PLAIN))(Image.fromarray(image))
        for mode in ("squash", "center")
    )
    assert whole[:, :, 0].min() > 0.9 and middle.max() == 0


def test_squash_takes_the_middle_of_an_image_resized_by_crop_pct():
    image = noise(64, 64)
    resized = image.resize((40, 40), Image.Resampling.BICUBIC).crop((4, 4, 36, 36))
    wanted = torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255
    config = InputConfig((32, 32), crop_pct=0.8, **PLAIN)
    torch.testing.assert_close(eval_transform(config)(image), wanted)


def test_crop_padding_shifts_the_image_and_leaves_black():
    config = InputConfig((8, 8), **PLAIN)
    transform = train_transform(config, Changes(crop_padding=1))
    white = Image.new("RGB", (8, 8), (255, 255, 255))
    shares = {round(float(seeded(transform, white, seed).mean()) * 64) for seed in range(50)}
    assert shares == {64, 56, 49}


def test_a_certain_flip_flips():
    config = InputConfig((8, 8), **PLAIN)
    image = noise(8, 8)
    assert torch.equal(train_transform(config, Changes(hflip=1.0))(image), eval_transform(config)(image).flip(-1))


def test_evaluation_interpolates_as_asked():
    squares = Image.fromarray(np.random.default_rng(0).choice([0, 255], (32, 32, 1)).astype(np.uint8).repeat(3, 2))
    for interpolation, mixes in (("nearest", False), ("bicubic", True)):
        values = eval_transform(InputConfig((24, 24), interpolation=interpolation, **PLAIN))(squares).unique()
        assert (len(values) > 2) == mixes


@pytest.mark.parametrize(
    ("changes", "height", "width"), [({"ratio": (1.0, 1.0)}, 0.5, 0.5), ({"ratio": (4.0, 4.0)}, 0.25, 1.0)]
)
def test_crops_are_as_large_and_as_wide_as_asked(changes, height, width):
    levels = np.arange(64) * 4
    across, down = np.broadcast_to(levels, (64, 64)), np.broadcast_to(levels[:, None], (64, 64))
    image = Image.fromarray(np.stack([across, down, down], 2).astype(np.uint8))
    transform = train_transform(InputConfig((64, 64), **PLAIN), Changes(scale=(0.25, 0.25), **changes))
    for seed in range(5):
        red, green, _ = seeded(transform, image, seed)
        assert float(red.max() - red.min()) == pytest.approx(width, abs=0.05)
        assert float(green.max() - green.min()) == pytest.approx(height, abs=0.05)


def test_jitter_changes_brightness():
    transform = train_transform(InputConfig((8, 8), **PLAIN), Changes(color_jitter=0.4))
    grey = Image.new("RGB", (8, 8), (100, 100, 100))
    levels = {round(float(seeded(transform, grey, seed).mean()), 3) for seed in range(5)}
    assert len(levels) == 5 and max(abs(level - 100 / 255) for level in levels) < 0.4


def test_rotation_turns_by_no_more_than_asked():
    config = InputConfig((33, 33), **PLAIN)
    spoke = np.zeros((33, 33, 3), np.uint8)
    spoke[16, 20:] = 255
    transform = train_transform(config, Changes(rotation=20.0))
    angles = []
    for seed in range(30):
        rows, columns = torch.nonzero(seeded(transform, Image.fromarray(spoke), seed)[0] > 0.3, as_tuple=True)
        angles.append(float(torch.atan2((rows - 16.0).mean(), (columns - 16.0).mean()).rad2deg()))
    assert max(map(abs, angles)) < 22 and min(angles) < -8 and max(angles) > 8


def test_erasing_covers_a_part():
    transform = train_transform(InputConfig((16, 16), **PLAIN), Changes(reprob=1.0, remode="const"))
    share = float((seeded(transform, Image.new("RGB", (16, 16), (255, 255, 255))) == 0).float().mean())
    assert 0.01 < share < 0.4


@pytest.mark.parametrize("aa", ["rand-m9-mstd0.5-inc1", "augmix-m3", "original", "3a"])
def test_the_same_seed_gives_the_same_image(aa):
    transform = train_transform(InputConfig((16, 16)), replace(EVERYTHING, aa=aa))
    image = noise(20, 20)
    assert torch.equal(seeded(transform, image), seeded(transform, image))
    assert not torch.equal(seeded(transform, image), seeded(transform, image, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aa": "ramd-m9"}, "no auto-augment policy 'ramd-m9'"),
        ({"remode": "pixels"}, "did you mean pixel"),
        ({"train_interpolation": "bicubik"}, "did you mean bicubic"),
        ({"hflip": 1.5}, "hflip is a probability"),
        ({"scale": (1.0, 0.5)}, "scale must be"),
        ({"ratio": (0.0, 1.0)}, "ratio must be"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(SubquadError, match=message):
        train_transform(InputConfig((8, 8)), Changes(**changes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"img_size": (8,)}, "a height and a width"),
        ({"img_size": 8}, "a height and a width, got 8"),
        ({"img_size": (8.5, 8)}, "a height and a width, got"),
        ({"img_size": (8, "8")}, "a height and a width, got"),
        ({"mean": 0.5}, "mean and std of 3 channels, got 0.5"),
        ({"std": ("a", "b", "c")}, "mean and std of 3 channels, got"),
        ({"crop_pct": None}, "crop_pct must be"),
        ({"crop_pct": 1.5}, "crop_pct must be"),
        ({"crop_mode": "centre"}, "did you mean center"),
        ({"interpolation": "cubic"}, "did you mean bicubic"),
        ({"std": (1.0, 1.0, 0.0)}, "mean and std of 3 channels"),
    ],
)
def test_wrong_inputs_are_refused(settings, message):
    with pytest.raises(SubquadError, match=message):
        InputConfig(**{"img_size": (8, 8)} | settings)


def test_lists_from_json_are_as_good_as_tuples():
    assert InputConfig([8, 8], mean=[0.5] * 3, std=[0.5] * 3) == InputConfig((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m0-mstd0.5", "original-mstd0.5", "v0", "augmix-m9-mstd0.5"]
)
def test_policies_never_posterize_to_nothing(policy):
    transform = train_transform(InputConfig((8, 8)), Changes(aa=policy, scale=(0.5, 1.0)))
    chains = [
        chain for step in transform.transforms for chain in [getattr(step, "ops", []), *getattr(step, "policy", [])]
    ]
    operations = [operation for chain in chains for operation in chain if operation.name.startswith("Posterize")]
    assert operations
    image = Image.new("RGB", (8, 8), (10, 200, 90))
    for operation in operations:
        for magnitude in (0, 2.5, 5, 10):
            bits = operation.level_fn(magnitude, operation.hparams)
            operation.aug_fn(image, *bits, **operation.kwargs)
