"""Hiera of timm and transformers: the order of its tokens, where its stages stand, what stays and what is refused."""

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from foreign import answer, difference, images
from foreign_hiera import HIERAS, Resampled, hiera_of_transformers, timms_hiera
from torch import nn

import subquad
from subquad import SubquadError
from subquad.conversion import align, converted_layers, relative_errors
from subquad.conversion.towers import find_tower
from subquad.models.stated_inputs import stated_size

WINDOWS_FIRST = (True, False, False, False)
PRETRAINING = {"decoder_hidden_size": 16, "decoder_depth": 1, "decoder_num_heads": 2}


def sharp(model):
    """A network whose queries choose among the keys."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            nn.init.normal_(parameter)
    return model.eval()


def unrolled(model, rows, columns):
    """Rows and columns (1, n, 2) of the tokens of images, in the order in which the network itself puts them."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()[None]
    if isinstance(model, timm.models.Hiera):
        return model.unroll(places)
    from transformers.models.hiera.modeling_hiera import unroll

    return unroll(places, (4 * rows, 4 * columns), model.config.patch_stride, model.unroll_schedule)


def pooled(places, side):
    """The same of the next stage, as blocks pool their queries."""
    return places.unflatten(1, (side**2, -1)).amax(1).div(side, rounding_mode="floor")


@pytest.mark.parametrize("of", [timms_hiera, hiera_of_transformers])
def test_tokens_are_put_in_the_order_of_the_map_as_the_network_took_them_from_it(of):
    model = of()
    layers = converted_layers(subquad.convert(model, "linear"))
    for rows, columns in [(16, 16)] if of is timms_hiera else [(16, 16), (8, 24), (32, 8)]:
        places = pooled(pooled(unrolled(model, rows, columns), 2), 2)
        for number, stage in ((3, places), (4, places), (6, pooled(places, 2))):
            height, width = (rows // 4, columns // 4) if number < 6 else (rows // 8, columns // 8)
            order = layers[number].order(subquad.TokenGrid(height, width), torch.device("cpu"))
            in_rows = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            assert torch.equal(stage[0, order].long(), in_rows)


def test_tokens_of_further_strides_and_larger_cells_are_put_in_order():
    """Cells of 3×3 pooled once, so that two strides are left in all later stages."""
    sizes = {"img_size": 108, "q_stride": (3, 3), "mask_unit_size": (27, 27), "q_pool": 1}
    model = timms_hiera(**sizes, mask_unit_attn=WINDOWS_FIRST)
    layers = converted_layers(subquad.convert(model, "linear"))
    assert list(layers) == [2, 3, 4, 5, 6]
    places = pooled(unrolled(model, 27, 27), 3)
    order = layers[6].order(subquad.TokenGrid(9, 9), torch.device("cpu"))
    assert torch.equal(places[0, order].long(), torch.cartesian_prod(torch.arange(9), torch.arange(9)))


@pytest.mark.parametrize("attention", ["inline", "agent:num_agents=4", "focused"])
def test_a_layer_answers_as_one_whose_tokens_come_row_by_row(attention):
    model = sharp(timms_hiera())
    layer = converted_layers(subquad.convert(model, attention))[4]
    for parameter in layer.inner.parameters():
        nn.init.normal_(parameter)
    in_rows = copy.deepcopy(layer)
    in_rows.left = ()
    x = torch.randn(2, 16, 64)
    with torch.no_grad():
        expected = in_rows(model.reroll(x, 4).flatten(1, 2))
        assert difference(model.reroll(layer(x), 4).flatten(1, 2), expected) < 1e-6
        assert difference(in_rows(x), layer(x)) > 1e-3


@pytest.mark.parametrize("name", HIERAS)
def test_queries_that_choose_find_the_keys_of_the_teacher(name):
    model = sharp(HIERAS[name][0]())
    student, other = subquad.convert(model, "softmax"), subquad.convert(model, "linear")
    for size in [(64, 64), *HIERAS[name][1]]:
        assert difference(answer(student, images(*size)), answer(model, images(*size))) < 2e-6
        assert max(relative_errors(other, model, images(*size)).values()) > 1e-3


@pytest.mark.parametrize("of", [timms_hiera, hiera_of_transformers])
def test_blocks_that_see_windows_or_lead_to_the_next_stage_stay(of):
    model = of()
    assert list(converted_layers(subquad.convert(model, "linear"))) == [3, 4, 6]
    with pytest.raises(SubquadError, match=r"\.0\.attn: it sees windows, and stays as it is"):
        subquad.convert(model, "linear", blocks=[0])
    for number in (1, 2, 5):
        with pytest.raises(SubquadError, match="a block that pools its queries can't be converted"):
            subquad.convert(model, "linear", blocks=[number])


def test_positions_are_made_for_the_map_of_their_stage():
    for of, size, grids in (
        (timms_hiera, None, [(4, 4), (4, 4), (2, 2)]),
        (hiera_of_transformers, None, [(4, 4), (4, 4), (2, 2)]),
        (hiera_of_transformers, (64, 96), [(4, 6), (4, 6), (2, 3)]),
    ):
        layers = converted_layers(subquad.convert(of(), "focused", img_size=size)).values()
        assert [layer.inner.positions.grid.shape for layer in layers] == grids


def not_fused(model):
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


# what makes it, and which of its blocks are converted: strides that are left in the last stages, mask units larger than
# all strides together, and stages that begin with more channels and no pooling
OTHERS = {
    "timm, pooled twice": (lambda: timms_hiera(q_pool=2), [3, 4, 5, 6]),
    "timm, large units": (lambda: timms_hiera(q_pool=2, mask_unit_size=(16, 16)), [3, 4, 5, 6]),
    "timm, positions of windows": (
        lambda: timms_hiera(abs_win_pos_embed=True, global_pos_size=(4, 4), init_values=0.5, use_expand_proj=False),
        [3, 4, 6],
    ),
    "timm, not fused": (lambda: not_fused(timms_hiera()), [3, 4, 6]),
    "transformers, pooled twice": (lambda: Resampled(hiera_of_transformers(num_query_pool=2)), [3, 4, 5, 6]),
    "transformers, pooled once": (
        lambda: Resampled(hiera_of_transformers(num_query_pool=1, masked_unit_attention=WINDOWS_FIRST)),
        [2, 3, 4, 5, 6],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_schedules_of_stages_are_followed(name):
    of, blocks = OTHERS[name]
    model, x = sharp(of()), images()
    student = subquad.convert(model, "softmax")
    assert difference(answer(student, x), answer(model, x)) < 2e-6
    layers = converted_layers(student)
    assert list(layers) == blocks
    assert all(len(layer.left) + len(layer.pooled) == 3 for layer in layers.values())
    for attention in ("agent", "mala"):
        assert answer(subquad.convert(model, attention), x).isfinite().all()


@pytest.mark.parametrize("of", [timms_hiera, hiera_of_transformers])
def test_copies_of_a_student_know_the_order(of):
    student = subquad.convert(sharp(of()), "inline")
    expected = answer(student, images())
    for again in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
        assert torch.equal(answer(again, images()), expected)


def test_maps_between_stages_are_those_of_the_teacher():
    model = sharp(timms_hiera())
    student = subquad.convert(model, "softmax")
    features = timm.create_model("hiera_tiny_224", features_only=True, img_size=64, stages=(1, 1, 3, 2), embed_dim=16)
    converted = subquad.convert(sharp(features), "softmax")
    with torch.no_grad():
        for one, other in ((student.forward_intermediates, model.forward_intermediates), (converted, features)):
            both = zip(one(images())[-1], other(images())[-1], strict=True)
            assert max(difference(ours, theirs) for ours, theirs in both) < 1e-5
        whole = sharp(hiera_of_transformers("HieraForImageClassification"))
        maps = [
            network(images(), output_hidden_states=True).reshaped_hidden_states
            for network in (subquad.convert(whole, "softmax"), whole)
        ]
        assert max(difference(ours, theirs) for ours, theirs in zip(*maps, strict=True)) < 1e-5


def test_a_hiera_says_which_images_it_is_made_for():
    model = timms_hiera(img_size=(64, 96))
    assert stated_size(model) == (64, 96)
    assert find_tower(model).grid.shape == (16, 24)
    with pytest.raises(SubquadError, match="takes 64×96 px alone, and no images of 128×128 px"):
        subquad.convert(model, "linear", img_size=128)
    assert find_tower(Resampled(hiera_of_transformers())).grid.shape == (16, 16)


def test_of_a_network_within_another_the_layers_are_converted_and_no_others():
    class Two(nn.Module):
        def __init__(self, first, second):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return self.first(x), self.second(x)

    plain = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=2, num_heads=4)
    for model in (timms_hiera(), hiera_of_transformers()):
        with pytest.warns(UserWarning, match="^second of this Two, .* stays as it is"):
            assert len(converted_layers(subquad.convert(Two(model, plain), "linear"))) == 3


@pytest.mark.parametrize("of", [timms_hiera, hiera_of_transformers])
def test_one_image_without_a_batch_is_called_so(of):
    student = subquad.convert(of(), "linear")
    said = r"takes images \(b, 3, height, width\), got \(3, 64, 64\): x\[None\] makes a batch of one image"
    with pytest.raises(SubquadError, match=said):
        student(images()[0])
    with pytest.raises(SubquadError, match=said):
        student(**{"x" if of is timms_hiera else "pixel_values": images()[0]})


def test_masked_images_are_refused():
    student = subquad.convert(timms_hiera(patch_drop_rate=0.5), "linear")
    # a quarter, as many tokens as the next stage has
    mask = torch.eye(4, dtype=torch.bool)[:2]
    said = "4 tokens are not those of a map of 4×4: a converted Hiera sees images as wholes, so give it no `mask`"
    with pytest.raises(SubquadError, match=said):
        student.eval()(images(), mask=mask)
    with pytest.raises(SubquadError, match=r"8 tokens are .* set its patch_drop_rate to 0 in training"):
        student.train()(images())
    assert student.eval()(images()).shape == (2, 5)
    with pytest.raises(SubquadError, match=r"drops tokens: open its weights with transformers\.HieraModel"):
        subquad.convert(hiera_of_transformers("HieraForPreTraining", **PRETRAINING), "linear")


def test_networks_whose_tokens_stand_otherwise_are_refused():
    with pytest.raises(SubquadError, match="HieraBackbone leaves tokens in rows that its blocks take for mask units"):
        subquad.convert(hiera_of_transformers("HieraBackbone"), "linear")
    with pytest.raises(SubquadError, match="pools cells of 2×1 queries can't be converted"):
        subquad.convert(timms_hiera(q_stride=(2, 1), mask_unit_size=(8, 1)), "linear")
    with pytest.raises(SubquadError, match="none of the 7 attention layers sees the whole image"):
        subquad.convert(timms_hiera(mask_unit_attn=(True,) * 4), "linear")


def checkpoint(network):
    # the older name of it, which the newer transformers warn of
    getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)()


@pytest.mark.parametrize("name", HIERAS)
def test_it_has_the_same_gradient_where_stages_are_computed_again(name):
    student = subquad.convert(sharp(HIERAS[name][0]()), "inline").train()
    network = student if "timm" in name else student.network
    again = network.set_grad_checkpointing if "timm" in name else partial(checkpoint, network)
    gradients = []
    for switch in (lambda: None, again):
        switch()
        student.zero_grad()
        losses = [student(images(*size)) for size in [(64, 64), *HIERAS[name][1]]]
        losses = [loss if isinstance(loss, torch.Tensor) else loss.last_hidden_state for loss in losses]
        sum(loss.square().mean() for loss in losses).backward()
        learnt = (parameter.grad for parameter in student.parameters())
        gradients.append(torch.cat([one.flatten() for one in learnt if one is not None]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", HIERAS)
def test_it_learns_from_its_teacher(name):
    model = sharp(HIERAS[name][0]())
    student = subquad.convert(model, "inline")
    aligned = align(student, images(number=8), teacher=model, updates=10, batch_size=4)
    assert sum(aligned.after.values()) < sum(aligned.before.values())
