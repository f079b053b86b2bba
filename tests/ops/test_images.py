"""A batch in turn is the batch at once, and its gradient, too."""

import pytest
import torch
from mechanisms import BATCH, assert_refused, build, inputs_of, refuses

from subquad import ATTENTION, TokenGrid
from subquad.ops import image_by_image

GRID = TokenGrid(4, 7)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_images_in_turn_are_images_at_once(name, padded, monkeypatch):
    module, supply = build(name, GRID), inputs_of(build(name, GRID), GRID)
    if padded:
        supply["padding"] = torch.arange(GRID.num_tokens).expand(BATCH, -1) > torch.tensor([[20], [25]])
        if refuses(name, "padding"):
            assert_refused(name, lambda: module(**supply, grid=GRID, kv_grid=GRID), "padding")
            return

    def run():
        inputs = {
            key: tensor.clone().requires_grad_() if tensor is not None and tensor.is_floating_point() else tensor
            for key, tensor in supply.items()
        }
        y = module(**inputs, grid=GRID, kv_grid=GRID)
        wanted = [tensor for tensor in inputs.values() if tensor is not None and tensor.requires_grad]
        return y, torch.autograd.grad(y.square().sum(), wanted)

    at_once = run()
    monkeypatch.setattr(image_by_image, "LARGE", 1)
    torch.testing.assert_close(run(), at_once)


def test_small_batches_and_single_images_run_at_once():
    seen = []

    def note(x):
        seen.append(len(x))
        return x

    image_by_image.by_image(note, torch.zeros(3, 10))
    image_by_image.by_image(note, torch.zeros(1, image_by_image.LARGE))
    image_by_image.by_image(note, torch.zeros(3, image_by_image.LARGE))
    assert seen == [3, 1, 1, 1, 1]
