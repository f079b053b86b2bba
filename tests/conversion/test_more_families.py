"""Further families of networks: the teacher with softmax, any mechanism, restored to the bit."""

from copy import deepcopy

import pytest
import torch
from foreign import (
    Answer,
    answer,
    difference,
    has_prefix,
    images,
    of_transformers,
    with_other_weights,
)
from foreign_more import MORE, teacher
from foreign_packs import PACKS, OfImages
from mechanisms import refuses
from torch import nn

import subquad
from subquad import ATTENTION, SubquadError
from subquad.conversion import (
    align,
    compare_networks,
    converted_layers,
    distil,
    load_converted,
    relative_errors,
    save_delta,
)
from subquad.conversion.towers import find_tower
from subquad.exports.programs import program_of
from subquad.grid import TokenGrid

SUB_QUADRATIC = sorted(name for name, cls in ATTENTION.items() if not cls.traits.quadratic)


@pytest.mark.parametrize("name", MORE)
def test_with_softmax_it_is_the_teacher_at_every_size_and_comes_back_to_the_bit(name):
    model = teacher(name)
    student = subquad.convert(model, "softmax")
    sizes = [(64, 64), *MORE[name][1]]
    for size in sizes:
        assert difference(answer(student, images(*size)), answer(model, images(*size))) < 1e-6
    before, state = answer(model, images()), model.state_dict()
    student = subquad.convert(model, "linear")
    for size in sizes:
        assert answer(student, images(*size)).isfinite().all()
    assert not torch.equal(answer(student, images()), before)
    new = student.state_dict().keys() - state.keys()
    assert all(".inner." in key or ".gate_of_tokens." in key for key in new)
    for layer in converted_layers(student).values():
        for parameter in layer.parameters():
            parameter.data.add_(1)
    restored = subquad.restore(student)
    assert torch.equal(answer(restored, images()), before)
    assert restored.state_dict().keys() == state.keys()


# PyTorch says it of timm's own norms
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", MORE)
def test_it_runs_under_autocast_as_the_teacher_does(name, attention):
    model, x = teacher(name), images()
    student = subquad.convert(model, attention)
    exact, of_teacher = answer(student, x), answer(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        half, teachers_half = answer(student, x), answer(model, x)
    assert half.dtype == teachers_half.dtype
    assert difference(half.float(), exact) < 3 * difference(teachers_half.float(), of_teacher) + 0.02


def test_a_call_may_bring_other_weights():
    for name in (name for name in MORE if any(kind in name for kind in ("Swin", "BEiT", "SAM"))):
        called, loaded = with_other_weights(subquad.convert(teacher(name), "softmax"), images())
        assert difference(called, loaded) < 1e-6, name


def test_tokens_that_are_shuffled_are_refused_with_what_to_do_instead():
    mae = of_transformers("ViTMAEModel", "ViTMAEConfig", mask_ratio=0.0)
    with pytest.raises(SubquadError, match=r"open its weights with transformers\.ViTModel"):
        subquad.convert(mae, "linear")


def test_patches_that_are_cut_before_the_network_are_refused():
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with pytest.raises(SubquadError, match="no patch embedding"):
        subquad.convert(nn.Sequential(nn.Linear(12, 16), nn.TransformerEncoder(block, 2)), "linear")


# timm's interpolation does what PyTorch warns of
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")
@pytest.mark.parametrize("name", ["timm BEiT", "timm BEiT, shared biases"])
def test_a_beit_is_made_for_other_images_by_timms_own_call(name):
    model = teacher(name)
    if not hasattr(model, "set_input_size"):
        pytest.skip("timm's has none in 1.0.26")
    students = {attention: subquad.convert(model, attention) for attention in ("softmax", "linear")}
    for one in (model, *students.values()):
        one.set_input_size((64, 96))
    expected = answer(model, images(64, 96))
    assert difference(answer(students["softmax"], images(64, 96)), expected) < 1e-6
    assert answer(students["linear"], images(64, 96)).isfinite().all()
    assert not any("relative_position_bias_table" in key for key in students["linear"].blocks.state_dict())
    assert torch.equal(answer(subquad.restore(students["linear"], strict=False), images(64, 96)), expected)


def test_lists_of_images_and_angles_of_each_image_are_refused():
    student = subquad.convert(teacher("DINOv2 of torch.hub"), "linear")
    answer(student, images())
    (layer, *_), tokens = converted_layers(student).values(), torch.randn(1, 17, 48)
    with pytest.raises(SubquadError, match="one tensor of images, not a list"):
        layer(tokens, attn_bias=object())
    student = subquad.convert(teacher("DINOv3 of torch.hub"), "linear")
    answer(student, images())
    (layer, *_), tokens = converted_layers(student).values(), torch.randn(2, 21, 48)
    with pytest.raises(SubquadError, match="turns all images of a batch alike"):
        layer(tokens, rope=tuple(torch.randn(2, 2, 1, 16, 12)))


@pytest.mark.parametrize("name", ["transformers EoMT", "transformers EoMT, DINOv3"])
def test_queries_that_are_masked_are_refused_and_those_that_are_not_are_trained(name):
    model = teacher(name)
    student = subquad.convert(model, "softmax")
    answers = []
    for one in (student, model):
        torch.manual_seed(0)  # positions of DINOv3 are drawn in training
        answers.append(answer(one.train(), images()))
    # there is a mask in training, of what all may see
    assert difference(*answers) < 1e-6
    (*_, layer), tokens = converted_layers(student).values(), torch.randn(2, 26, 48)
    mask = torch.ones(2, 4, 26, 26)
    mask[0, :, 3, 12] = -1e9
    with pytest.raises(SubquadError, match="set its attn_mask_probs to zeros"):
        layer(tokens, mask)


def test_tokens_beside_the_map_have_positions_in_the_layers_where_they_are():
    for name, counts in (("transformers EoMT", [5, 5, 10]), ("transformers YOLOS", [8, 8])):
        layers = converted_layers(subquad.convert(teacher(name), "focused")).values()
        assert [layer.inner.positions.grid.prefix for layer in layers] == counts, name


@torch.no_grad()
@pytest.mark.parametrize("name", ["transformers Idefics 2", "transformers Idefics 3", "transformers SmolVLM"])
def test_padded_images_of_idefics_and_smolvlm_are_what_they_are_alone(name):
    seen = torch.ones(3, 4, 4, dtype=torch.bool)
    seen[1, 2:] = False
    seen[2, 3:], seen[2, :, 2:] = False, False
    model, few, fewer = teacher(name), images(number=3)[1:2, :, :32], images(number=3)[2:, :, :48, :32].contiguous()
    for attention, cls in ATTENTION.items():
        if "prefix" in cls.traits.refuses and name == "transformers Idefics 2":
            continue
        student = subquad.convert(model, attention)
        # an image that is whole has nothing to be left out
        padded = student(images(number=3), patch_attention_mask=seen)[0]
        alone = student(few.contiguous(), patch_attention_mask=seen[1:2, :2].contiguous())[0]
        assert difference(padded[1:2, :8], alone) < 1e-5, attention
        alone = student(fewer, patch_attention_mask=seen[2:, :3, :2].contiguous())[0]
        assert difference(padded[2].view(4, 4, -1)[:3, :2].flatten(0, 1)[None], alone) < 1e-5, attention


PACKED = list(PACKS)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("attention", ["softmax", "focused", "agent:num_agents=4"])
def test_images_of_a_pack_are_what_they_are_alone(name, attention):
    student = subquad.convert(teacher(name), attention)
    several = [images(64, 96, 1), images(32, 32, 2), images(64, 96, 1) + 1]
    with torch.no_grad():
        together = student.of_pack(*student.together(several))
        alone = torch.cat([student(one).flatten(0, 1) for each in several for one in each[:, None]])
    assert difference(together, alone) < 1e-5


@pytest.mark.parametrize("name", PACKED)
def test_patches_of_a_pack_stand_where_their_pixels_are(name):
    student = subquad.convert(teacher(name), "linear")
    side = student.config.patch_size
    rows, columns = 64 // side, 96 // side
    shown = torch.arange(2.0 * rows * columns).view(2, 1, rows, columns)
    x = shown.repeat_interleave(side, 2).repeat_interleave(side, 3).expand(2, 3, 64, 96)
    with torch.no_grad():
        student(x)
    layer, *_ = converted_layers(student).values()
    grid = layer.recorder.last_standing.grid
    places = grid.places.long().view(2, -1, 2)[:, grid.tokens_in_front :].flatten(0, 1)
    places = places - places.amin(0)  # some begin with 1
    image = torch.arange(2).repeat_interleave(rows * columns)
    assert torch.equal(student.means(student.patches(x)[0]), shown[image, 0, places[:, 0], places[:, 1]])


@pytest.mark.parametrize("name", ["transformers SigLIP 2, NaFlex", "transformers Pix2Struct"])
def test_tokens_that_fill_images_up_count_in_no_figure(name):
    tower, together_of = teacher(name).tower, teacher(name).together
    student = subquad.convert(tower, "linear")
    of_naflex = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    names = of_naflex if "NaFlex" in name else ("flattened_patches", "attention_mask")

    def pack(*several):
        return dict(zip(names, together_of(several), strict=False))

    large, small = images(64, 96, 1), images(48, 32, 1)
    alone = [relative_errors(student, tower, pack(one)) for one in (large, small)]
    together = relative_errors(student, tower, pack(large, small))
    for block, error in together.items():
        assert error == pytest.approx((alone[0][block] + alone[1][block]) / 2, rel=1e-4)
    apart = [compare_networks(student, tower, [(pack(one), None)]) for one in (large, small)]
    both = compare_networks(student, tower, [(pack(large, small), None)])
    assert both.error == pytest.approx((apart[0].error + apart[1].error) / 2, rel=1e-4)
    assert both.cosine == pytest.approx((96 * apart[0].cosine + 24 * apart[1].cosine) / 120, rel=1e-4)
    fitted = distil(student, lambda update: pack(large, small), teacher=tower, updates=1)
    assert fitted.judged["last_hidden_state"][0][1] == pytest.approx(both.error, rel=1e-4)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers SigLIP 2, NaFlex", "transformers MiniCPM-OCR"])
def test_a_compiled_tower_of_packs_answers_as_it_does(name):
    wrapper = teacher(name)
    student = subquad.convert(wrapper.tower, "linear")
    # what it breaks its graph for is said in logs, and is no error
    compiled = torch.compile(student, backend="eager")
    for given in (wrapper.given(images(64, 96, 2)), wrapper.given(images(96, 64, 1))):
        with torch.no_grad():
            assert difference(compiled(**given)[0], student(**given)[0]) < 1e-6


def test_a_mask_of_other_tokens_than_those_that_stand_somewhere_is_refused():
    student = subquad.convert(teacher("transformers SigLIP 2, NaFlex"), "softmax")
    patches, there, sizes = student.together([images(64, 96, 1), images(48, 32, 1)])
    with pytest.raises(SubquadError, match="leaves 192 tokens to be seen, and 120 stand on the maps"):
        student.tower(patches, torch.ones_like(there), sizes)


def test_a_tower_of_packs_is_fitted_by_arguments_by_name():
    tower = teacher("transformers Qwen3-VL").tower
    patches, numbers = OfImages(tower).patches(images(64, 96, 3))
    pack, student = {"hidden_states": patches, "grid_thw": numbers}, subquad.convert(tower, "focused")
    fitted = align(student, lambda update: pack, teacher=tower, updates=2)
    assert fitted.after.keys() == {0, 1}
    fitted = distil(student, lambda update: pack, teacher=tower, updates=2)
    assert fitted.judged.keys() == {"last_hidden_state", "pooler_output", "deepstack_features 0"}
    assert compare_networks(student, tower, [(pack, None)]).images == 3


def test_a_transformers_that_does_not_say_where_patches_stand_is_refused():
    student = subquad.convert(teacher("transformers Qwen3-VL"), "linear")
    recorder = next(iter(converted_layers(student).values())).recorder
    # as versions before called their rotary embedding: with how many there are
    with pytest.raises(SubquadError, match="of this transformers is not told where patches stand"):
        recorder(student.tower.rotary_pos_emb, (4,), None)


def test_frames_of_a_film_are_images_of_a_pack_and_parts_of_maps_are_refused():
    model = teacher("transformers Qwen3-VL")
    student = subquad.convert(model, "softmax")
    film, _ = model.patches(images(32, 64, 3))
    numbers = torch.tensor([[3, 4, 8]])
    with torch.no_grad():
        expected = model.tower(film, numbers).last_hidden_state
        assert difference(student.tower(film, numbers).last_hidden_state, expected) < 1e-6
    (layer, *_), tokens = converted_layers(student).values(), torch.randn(96, 48)
    turns = tuple(torch.randn(2, 96, 12))
    with pytest.raises(SubquadError, match="40 tokens that attend to each other are not those of one map of 4×8"):
        layer(tokens, torch.tensor([0, 40, 96]), turns)
    with pytest.raises(SubquadError, match="95 tokens are not those of the last image"):
        layer(tokens[1:], torch.tensor([0, 95]), turns)


@pytest.mark.parametrize("name", [name for name in PACKED if "Qwen2.5" in name])
def test_windows_of_packs_stay_and_are_converted_where_they_are_named(name):
    model = teacher(name)
    assert list(converted_layers(subquad.convert(model, "linear"))) == [1]
    student, several = subquad.convert(model, "softmax", blocks=[0, 1]), [images(96, 80, 1), images(32, 64, 2)]
    pack = student.together(several)
    with torch.no_grad():
        assert difference(student.tower(*pack).last_hidden_state, model.tower(*pack).last_hidden_state) < 1e-6
    layer, tokens = converted_layers(student)[1], torch.randn(len(pack[0]), 48)
    turns = tuple(torch.randn(2, len(tokens), 12))
    with pytest.raises(SubquadError, match="turned by other positions than those that the rotary embedding was told"):
        layer(tokens, torch.tensor([0, len(tokens)]), turns)


@pytest.mark.parametrize("name", ["transformers RF-DETR", "transformers LW-DETR"])
def test_blocks_of_detectors_that_see_windows_stay(name):
    model = teacher(name)
    layers = converted_layers(subquad.convert(model, "focused"))
    prefix = 4 if "RF" in name else 0
    assert {number: layer.inner.positions.grid for number, layer in layers.items()} == {1: TokenGrid(4, 4, prefix)}
    with pytest.raises(SubquadError, match=r"layer\.2\.attention sees windows, and stays as it is"):
        subquad.convert(model, "linear", blocks=[1, 2])


def test_blocks_of_sam_2_that_lead_to_the_next_stage_stay():
    model = teacher("transformers SAM 2")
    assert list(converted_layers(subquad.convert(model, "linear"))) == [2, 4]
    assert list(converted_layers(subquad.convert(model, "linear", blocks=[0, 2]))) == [0, 2]
    with pytest.raises(SubquadError, match="pools its queries"):
        subquad.convert(model, "linear", blocks=[1])


def test_positions_of_sam_2_are_made_for_the_map_of_their_stage():
    student = subquad.convert(teacher("transformers SAM 2"), "focused")
    made = {number: layer.inner.positions.grid for number, layer in converted_layers(student).items()}
    assert {number: (grid.height, grid.width) for number, grid in made.items()} == {2: (8, 8), 4: (4, 4)}


@pytest.mark.parametrize("name", [name for name in MORE if "Swin" in name])
def test_swin_blocks_that_are_not_quadratic_lose_windows_and_biases(name):
    student = subquad.convert(teacher(name), {0: "softmax", 1: "linear"})
    kept = {"relative_position_bias_table", "cpb_mlp", "continuous_position_bias_mlp"}
    with_bias = {key for key in student.state_dict() if kept & set(key.split("."))}
    windows = [layer.window for layer in converted_layers(student).values()]
    assert windows == [TokenGrid(4, 4), None]
    paths = [layer.path for layer in find_tower(teacher(name)).layers]
    for path, there in ((paths[0], True), (paths[1], False), (paths[-1], True)):
        assert any(key.startswith(f"{path}.") for key in with_bias) == there


@torch.no_grad()
@pytest.mark.parametrize("kind", ["SwinModel", "SwinBackbone"])
def test_windows_of_transformers_swin_are_shifted_where_its_calls_shift_them(kind):
    """By the map of a call: one that is no larger than a window is not shifted, but in a backbone."""
    import transformers

    sizes = {"image_size": 64, "embed_dim": 24, "depths": [2, 2, 2], "num_heads": [2, 2, 2], "window_size": 4}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.SwinConfig(**sizes, out_features=["stage2", "stage3"])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5)
    student = subquad.convert(model, "softmax")
    fast = subquad.optimize(deepcopy(student))
    for size in [(64, 64), (128, 96), (64, 160), (64, 64), *([(40, 72)] if kind == "SwinBackbone" else [])]:
        # a model forgets its shift once it is called with a small map
        found = [one(images(*size)) for one in (deepcopy(model), student, fast)]
        maps = [one.feature_maps if kind == "SwinBackbone" else [one.last_hidden_state] for one in found]
        for expected, *others in zip(*maps, strict=True):
            assert all(difference(other, expected) < 1e-5 for other in others), size


def patches_of_two(name):
    """Images of two sizes as networks take them that are told where patches stand: arguments by name."""
    if "RADIO" in name:
        return {"pixel_values": torch.randn(24, 768), "image_grid_hw": torch.tensor([[4, 4], [2, 4]])}
    places = torch.tensor([[y, x] for y in range(4) for x in range(4)]).expand(2, -1, -1)
    return {"x": torch.randn(2, 16, 768), "patch_coord": places, "patch_valid": torch.arange(32).view(2, 16) < 24}


@pytest.mark.parametrize("name", ["timm NaFlexViT", "transformers RADIO"])
def test_patches_of_images_of_several_sizes_are_refused_and_no_trouble_to_the_teacher(name):
    model = teacher(name)
    student = subquad.convert(model, "linear")
    assert student.subquad_conversion.grid[:2] == ((24, 24) if "NaFlex" in name else (4, 4))
    with torch.no_grad():
        model(**patches_of_two(name))
        with pytest.raises(SubquadError, match=r"images .* of one size at a time"):
            student(**patches_of_two(name))


def some_mechanisms(name):
    """Agent attention, and another one for each family; all of them are converted in test_converting.py."""
    able = [other for other in SUB_QUADRATIC if not (has_prefix(name) and refuses(other, "prefix"))]
    return dict.fromkeys(("agent", able[list(MORE).index(name) % len(able)]))


STUDENTS = [(name, other) for name in MORE for other in some_mechanisms(name)]


def student_of(model, attention):
    return subquad.convert(model, attention, **({"num_agents": 4} if attention == "agent" else {}))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention"), STUDENTS)
def test_a_student_runs_and_is_kept(name, attention, tmp_path):
    model = teacher(name)
    student = student_of(model, attention)
    save_delta(student, tmp_path / "delta.safetensors", teacher=model)
    again = load_converted(tmp_path / "delta.safetensors", model)
    assert torch.equal(answer(again, images()), answer(student, images()))


# transformers reads the numbers of patches, so that nothing can be traced, the teacher neither
@pytest.mark.slow
@pytest.mark.thinned(12)
@pytest.mark.parametrize(("name", "attention"), [pair for pair in STUDENTS if pair[0] not in PACKED])
def test_a_student_is_exported(name, attention):
    student = student_of(teacher(name), attention)
    expected = answer(student, images())
    if "EoMT" in name:
        # which PyTorch alone can't trace, the teacher neither: it asks a buffer what to do
        program = program_of(Answer(student), (images(),), (), least=64)
    else:
        program = torch.export.export(student, (images(),), strict=False)
    answered = program.module()(images())
    # SOFT's Newton steps make more of the rounding of a product
    bound = 1e-4 if attention == "soft" else 1e-5
    assert difference(answered if isinstance(answered, torch.Tensor) else answered[0], expected) < bound


WITH_BIASES = [name for name in MORE if any(kind in name for kind in ("Swin", "BEiT", "relative positions"))]


@pytest.mark.slow
@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", WITH_BIASES)
def test_biases_and_windows_hold_no_program_to_a_number_of_images(name, tmp_path):
    student = Answer(subquad.convert(teacher(name), "softmax"))
    written = subquad.export(student, tmp_path / "n.pt2", format="pt2", img_size=64, dynamic="batch")
    assert written.shapes == ((1, 64, 64), (3, 64, 64))


def test_the_maps_of_all_frames_of_a_film_stand_below_one_another():
    model = teacher("transformers V-JEPA 2").network
    student = subquad.convert(model, "agent", num_agents=4)
    layers = converted_layers(student)
    # two pairs of frames, each of 4×4 patches; what predicts from the film is no part of it
    assert len(layers) == 2 and layers[0].inner.agent_bias.grid.shape == (8, 4)
    longer = subquad.convert(model, "agent", num_agents=4, img_size=(6, 64, 64))
    assert converted_layers(longer)[0].inner.agent_bias.grid.shape == (12, 4)
    films = torch.randn(1, 6, 3, 64, 64)
    assert student(films).last_hidden_state.shape == (1, 48, 48)
    softmax = subquad.convert(model, "softmax")
    # in fp32 what processors round differently is above 1e-6 on some of them
    wide = [network.double()(films.double(), skip_predictor=False) for network in (softmax, model)]
    assert difference(*(one.predictor_output.last_hidden_state for one in wide)) < 1e-12
    pretraining = subquad.convert(of_transformers("VideoMAEForPreTraining", "VideoMAEConfig", num_frames=4), "linear")
    with pytest.raises(SubquadError, match="16 tokens are not those of the last image"):
        pretraining(films[:, :4], bool_masked_pos=torch.arange(32)[None] < 16)
    with pytest.raises(SubquadError, match="takes no position_mask"):
        layers[0](torch.randn(1, 32, 48), position_mask=torch.zeros(1, 32, dtype=torch.long))


class Encoder(nn.Module):
    """PyTorch's own layers, called with masks."""

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 32, 4, 4)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x, absent=None, mask=None):
        return self.layers(self.patch_embed(x).flatten(2).mT, src_key_padding_mask=absent, mask=mask)


@torch.no_grad()
def test_masks_of_pytorchs_own_layers_are_read_as_those_layers_hand_them_on():
    """Their layers make numbers of masks, which were refused."""
    model, x = Encoder().eval(), torch.randn(2, 3, 32, 32)
    student = subquad.convert(model, "softmax", img_size=32)
    absent, pairs = torch.zeros(2, 64, dtype=torch.bool), torch.rand(8, 64, 64) > 0.7
    absent[1, 40:] = True
    pairs.diagonal(dim1=1, dim2=2).fill_(False)
    assert difference(student(x, absent)[~absent], model(x, absent)[~absent]) < 1e-6
    for mask in (pairs[0], pairs, torch.zeros(64, 64).masked_fill(pairs[0], -torch.inf)):
        assert difference(student(x, None, mask), model(x, None, mask)) < 1e-6
    linear = subquad.convert(model, "linear", img_size=32)
    seen = linear(x, absent)[1, :40]
    # what is absent is seen by no one, in whatever place of the image it stands
    assert (
        difference(linear(torch.cat([x[:1], x[1:] + 5 * (torch.arange(32) > 23)[:, None]]), absent)[1, :40], seen)
        < 1e-6
    )
    with pytest.raises(SubquadError, match="no biases of pairs"):
        student(x, None, torch.randn(64, 64))


def test_a_layer_of_data2vec_is_to_know_the_image_for_its_biases():
    layer = converted_layers(subquad.convert(teacher("transformers Data2Vec"), "softmax"))[0]
    with pytest.raises(SubquadError, match="call it with resolution"):
        layer(torch.randn(1, 17, 48))


def attentive(kind):
    """A tiny network of transformers that gives its attention maps."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"image_size": 32, "patch_size": 8, "attn_implementation": "eager"}
    if kind in ("Swin", "Swinv2"):
        swin = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "patch_size": 4}
        sizes = swin | {name: sizes[name] for name in ("image_size", "attn_implementation")}
    name = "InternVLVision" if kind == "InternVL" else kind
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()


@pytest.mark.parametrize("kind", ["ViT", "InternVL", "DPT", "Beit", "Swin", "Swinv2", "Data2VecVision"])
def test_attention_maps_of_a_student_are_refused(kind):
    """Those of blocks that stayed stood in the first places."""
    model, x = attentive(kind), torch.randn(1, 3, 32, 32)
    assert len(model(x, output_attentions=True).attentions)
    for blocks in ([0], None):
        student = subquad.convert(model, "softmax", blocks=blocks)
        student(x, output_hidden_states=True)
        with pytest.raises(SubquadError, match="forms no attention maps: leave output_attentions out"):
            student(x, output_attentions=True)
        student.config.output_attentions = True
        with pytest.raises(SubquadError, match="forms no attention maps: leave output_attentions out"):
            student(x)


def test_attention_maps_beside_a_tower_are_given():
    """A network of language has maps of its own, whatever its tower mixes by."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    text = transformers.CLIPTextConfig(**sizes, vocab_size=99)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    config._attn_implementation = "eager"
    student = subquad.convert(transformers.CLIPModel(config).eval(), "softmax")
    found = student.text_model(torch.ones(1, 5, dtype=torch.long), output_attentions=True)
    assert len(found.attentions) == 2


def test_what_holds_a_network_is_told_where_it_is(tmp_path):
    class Opened:
        model = nn.Linear(2, 2)

    for call in (
        subquad.optimize,
        lambda it: subquad.convert(it, "linear"),
        lambda it: subquad.export(it, tmp_path / "a.pt2"),
    ):
        with pytest.raises(SubquadError, match=r": give its \.model$"):
            call(Opened())
