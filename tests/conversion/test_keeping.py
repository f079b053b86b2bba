"""Delta files, hybrids, comparisons with the teacher, advice."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from foreign import FOREIGN, answer, sharp, teacher
from mechanisms import refuses
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import subquad
from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.conversion import (
    ConvertedAttention,
    advise,
    align,
    blocks_but,
    blocks_for,
    blocks_within,
    compare_networks,
    conversion_of,
    convert_without_training,
    converted_layers,
    delta_files,
    distil,
    hybrid,
    load_converted,
    relative_errors,
    save_converted,
    save_delta,
    sensitivity,
    trade_off,
)
from subquad.conversion.judging import linear_probe, nearest_neighbours
from subquad.conversion.measured_costs import check_sizes, measure_costs
from subquad.conversion.replacing import old_layer
from subquad.conversion.training_free import NystromAttention
from subquad.exports.engine_times import timed_here
from subquad.tasks.network_costs import count_macs, count_macs_of
from subquad.tasks.segmentation import build_segmenter
from subquad.tasks.transformers_network import NetworkOfTransformers

PICTURES = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def fitted(attention="agent:num_agents=4", train=None):
    model = teacher("timm ViT")
    student = subquad.convert(model, attention)
    align(student, PICTURES, teacher=model, updates=2, batch_size=8)
    if train:
        distil(student, PICTURES, teacher=model, train=train, updates=2, batch_size=8, lr=1e-5)
    return model, student


@pytest.mark.parametrize("train", [None, "new", "all"])
@pytest.mark.parametrize("complete", [False, True])
def test_a_converted_network_is_kept_and_read(train, complete, tmp_path):
    model, student = fitted(train=train)
    file = tmp_path / "student.safetensors"
    if complete:
        save_converted(student, file)
    else:
        save_delta(student, file, teacher=model if train == "all" else None)
    read = load_converted(file, teacher("timm ViT"))
    for px in (64, 96):
        assert torch.equal(answer(read, PICTURES[..., :px, :px]), answer(student, PICTURES[..., :px, :px]))
    assert conversion_of(read) == conversion_of(student)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, partial(torch.compile, backend="eager")], ids=["parallel", "compiled"]
)
def test_wrapped_networks_are_kept_and_exported_as_what_they_wrap(wrap, tmp_path):
    model, student = fitted()
    wrapped = wrap(student)
    save_converted(wrapped, tmp_path / "whole.safetensors")
    save_delta(wrapped, tmp_path / "delta.safetensors", teacher=wrap(model))
    for name in ("whole", "delta"):
        read = load_converted(tmp_path / f"{name}.safetensors", teacher("timm ViT"))
        assert torch.equal(answer(read, PICTURES), answer(student, PICTURES))
    assert subquad.export(wrapped, tmp_path / "x.pt2", format="pt2", img_size=64).path.is_file()


def test_a_delta_is_small_and_a_whole_file_needs_no_teacher(tmp_path):
    model = teacher("timm ViT")
    student = subquad.convert(model, "inline", blocks=[1])
    count = save_delta(student, tmp_path / "delta.safetensors")
    assert count == len([name for name in student.state_dict() if ".inner." in name])
    save_converted(student, tmp_path / "whole.safetensors")
    torch.manual_seed(5)
    other = FOREIGN["timm ViT"][0]().eval()
    assert torch.equal(
        answer(load_converted(tmp_path / "whole.safetensors", other), PICTURES), answer(student, PICTURES)
    )


@pytest.mark.parametrize("name", ["torch encoder", "timm SAM", "our DINOv3", "transformers DINOv3"])
def test_other_families_are_kept_too(name, tmp_path):
    student = subquad.convert(teacher(name), "pola")
    with torch.no_grad():
        for layer in converted_layers(student).values():
            layer.inner.power.add_(1)
    save_delta(student, tmp_path / "delta.safetensors")
    read = load_converted(tmp_path / "delta.safetensors", teacher(name))
    assert torch.equal(answer(read, PICTURES), answer(student, PICTURES))


def test_files_of_something_else_are_one_line(tmp_path):
    model, student = fitted(train="all")
    # a fit ends in its best state, which may be that in which it began
    nn.init.normal_(student.norm.weight)
    file = tmp_path / "delta.safetensors"
    with pytest.raises(SubquadError, match="give `teacher`"):
        save_delta(student, file)
    with pytest.raises(SubquadError, match="another network"):
        save_delta(student, file, teacher=student)
    assert not file.exists()
    save_delta(student, file, teacher=model)
    other = teacher("timm ViT")
    nn.init.zeros_(other.norm.weight)
    with pytest.raises(SubquadError, match="changes to other weights"):
        load_converted(file, other)
    with pytest.raises(SubquadError, match="does not fit this Plain"):
        load_converted(file, teacher("torch encoder"))
    subquad.save_weights(model, tmp_path / "weights.safetensors")
    with pytest.raises(SubquadError, match="no file of a converted network"):
        load_converted(tmp_path / "weights.safetensors", model)
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(SubquadError, match="damaged"):
        load_converted(file, model)


def test_changes_of_a_network_that_moved_are_kept_beside_the_teacher_that_did_not(tmp_path):
    model, file = teacher("timm ViT"), tmp_path / "delta.safetensors"
    student = subquad.convert(model, "agent")
    student.set_input_size((96, 64))
    with pytest.raises(SubquadError, match="set_input_size moved other tables: give `teacher`"):
        save_delta(student, file)
    save_delta(student, file, teacher=model)
    images = torch.randn(1, 3, 96, 64)
    assert torch.equal(answer(load_converted(file, model), images), answer(student, images))


def test_sizes_that_a_file_asks_for_are_possible_ones(tmp_path, monkeypatch):
    student, file = subquad.convert(teacher("timm ViT"), "linear"), tmp_path / "student.safetensors"
    for size, reason in (
        ([10**6, 64], "1000000, 64. px: two sides of 1 to 8192 px"),
        (["x", 64], "two sides of"),
        ([64], "two sides of"),
        (3, "two sides of"),
        ([60, 64], "does not fit this VisionTransformer: pos_embed"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(delta_files, "made_for", lambda *_, size=size: size)
            save_converted(student, file)
        with pytest.raises(SubquadError, match=reason):
            load_converted(file, teacher("timm ViT"))


def refused(call):
    with pytest.raises(SubquadError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_could_not_be_read_are_not_written(tmp_path):
    student = subquad.convert(teacher("timm ViT"), "linear")
    for save, what in ((save_converted, "a converted network is"), (save_delta, "what conversion changed is")):
        for name in ("student.pth", "student", "student.safetensors.bak"):
            assert refused(partial(save, student, tmp_path / name)) == f"{what} written as .safetensors, got {name}"
        assert "names a file, got None" in refused(partial(save, student, None))
    assert "names a file, got None" in refused(partial(load_converted, None, student))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("head", [nn.Linear(48, 7), nn.Sequential(nn.Linear(48, 5)), nn.Identity()])
def test_a_delta_of_a_network_with_another_head_is_not_written(head, tmp_path):
    model = teacher("timm ViT")
    student = subquad.convert(model, "linear")
    student.head = head
    file = tmp_path / "delta.safetensors"
    said = refused(partial(save_delta, student, file, teacher=model))
    assert re.match(r"head\.\S+, head\.\S+.* are not in both, .* keep it by subquad\.conversion\.save_converted$", said)
    assert not file.exists()
    save_converted(student, file)
    model.head = head
    assert torch.equal(answer(load_converted(file, model), PICTURES), answer(student, PICTURES))


def test_a_network_whose_converted_blocks_are_gone_is_told_so(tmp_path):
    model = teacher("timm ViT")
    pruned = subquad.convert(model, "linear")
    pruned.prune_intermediate_layers([0], prune_head=True)
    file = tmp_path / "student.safetensors"
    for call in (
        partial(converted_layers, pruned),
        partial(align, pruned, PICTURES, teacher=model),
        partial(save_converted, pruned, file),
        partial(save_delta, pruned, file, teacher=model),
        partial(hybrid, pruned, [0]),
    ):
        assert "no blocks.1.attn any more" in refused(call)
    assert not file.exists()
    answer(subquad.restore(pruned, strict=False), PICTURES)


def test_blocks_that_are_wrapped_since_are_named_as_such(tmp_path):
    student, file = subquad.convert(teacher("timm ViT"), "linear"), tmp_path / "student.safetensors"
    blocks = set(student.blocks)
    apply_activation_checkpointing(student, check_fn=blocks.__contains__)
    for call in (partial(save_converted, student, file), partial(align, student, PICTURES)):
        assert "blocks.0.attn is blocks.0._checkpoint_wrapped_module.attn by now" in refused(call)
    # as the line says
    plain = subquad.convert(teacher("timm ViT"), "linear")
    plain.load_state_dict(student.state_dict())
    save_converted(plain, file)


def test_the_blocks_that_cost_least_are_converted_first():
    model, student = fitted("linear")
    # a block that answers wrongly
    with torch.no_grad():
        converted_layers(student)[0].proj.weight.mul_(-3)
    before = answer(student, PICTURES)
    damages = sensitivity(student, model, [PICTURES[:4], PICTURES[4:]])
    assert [row.block for row in damages] == [0, 1]
    assert damages[0].damage > damages[1].damage > 0
    rows = trade_off(student, model, [PICTURES], damages)
    assert [row.converted for row in rows] == [(), (1,), (0, 1)]
    assert rows[0].damage == 0
    rows = rows[1:]
    assert rows[0].damage == pytest.approx(damages[1].damage, rel=1e-4)
    assert torch.equal(answer(student, PICTURES), before)
    assert blocks_within(rows, tolerance=rows[0].damage * 1.01) == (1,)
    timed = trade_off(student, model, [PICTURES], damages, at=(64, 96), repeats=1)
    assert all(row.ms > 0 for row in timed)
    assert blocks_for([replace(row, ms=12 - 4 * len(row.converted)) for row in timed], speedup=1.4) == (1,)
    assert blocks_but(damages, keep=1) == (1,)
    assert blocks_but(damages, keep=0) == (0, 1)
    for call, says in (
        (lambda: blocks_within(rows, tolerance=0), "no block can be converted within"),
        (
            lambda: blocks_for(timed, speedup=99),
            "converting . of 2 blocks, the quickest of all, makes the network .* not 99 times",
        ),
        (lambda: blocks_but(damages, keep=2), "keep from 0 to 1"),
        (lambda: hybrid(student, [5]), "blocks are some of"),
    ):
        with pytest.raises(SubquadError, match=says):
            call()


def test_hybrids_are_timed_without_what_makes_them(monkeypatch):
    model, student = fitted("linear")
    made, stood = [], []

    def noted_layer(layer):
        made.append(layer)
        return old_layer(layer)

    def seconds_of(run, device):
        before = len(made)
        run()
        assert len(made) == before
        paths = conversion_of(student).paths.items()
        stood.append(tuple(n for n, path in paths if isinstance(student.get_submodule(path), ConvertedAttention)))
        return 1.0

    monkeypatch.setattr("subquad.conversion.hybrids.old_layer", noted_layer)
    monkeypatch.setattr("subquad.timing.seconds_of", seconds_of)
    damages = sensitivity(student, model, [PICTURES])
    rows = trade_off(student, model, [PICTURES], damages, at=(64, 64), repeats=2)
    assert [row.ms for row in rows] == [1000] * 3
    assert sorted(stood) == sorted(2 * [row.converted for row in rows])


def test_a_layer_that_stands_in_several_blocks_is_converted_in_all_of_them():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=3, num_heads=4, num_classes=5)
    model.blocks[2].attn = model.blocks[0].attn
    before = answer(model.eval(), PICTURES)
    written_out = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=48, depth=3, num_heads=4, num_classes=5
    )
    written_out.load_state_dict(model.state_dict())
    student, other = subquad.convert(model, "linear"), subquad.convert(written_out.eval(), "linear")
    assert student.blocks[2].attn is student.blocks[0].attn and list(converted_layers(student)) == [0, 1]
    torch.testing.assert_close(answer(student, PICTURES), answer(other, PICTURES))
    rows = trade_off(student, model, [PICTURES], sensitivity(student, model, [PICTURES]))
    assert rows[0].damage == 0 and rows[-1].damage > 0
    restored = subquad.restore(student)
    assert restored.blocks[2].attn is restored.blocks[0].attn and torch.equal(answer(restored, PICTURES), before)


def test_a_hybrid_is_a_converted_network_like_any(tmp_path):
    model, student = fitted("linear")
    some = hybrid(student, [1])
    assert list(converted_layers(some)) == [1]
    assert type(some.blocks[0].attn) is type(model.blocks[0].attn)
    save_delta(some, tmp_path / "delta.safetensors")
    assert torch.equal(
        answer(load_converted(tmp_path / "delta.safetensors", teacher("timm ViT")), PICTURES), answer(some, PICTURES)
    )
    assert torch.equal(answer(subquad.restore(some), PICTURES), answer(model, PICTURES))


def test_a_network_agrees_with_itself():
    model = teacher("timm ViT")
    labels = answer(model, PICTURES).argmax(1)
    found = compare_networks(model, model, [(PICTURES, labels)])
    assert (found.images, found.agreement, found.kept) == (8, 1, 1)
    assert found.cosine == pytest.approx(1)
    assert found.error == 0
    assert "100.00% kept" in found.text
    student = subquad.convert(model, "linear")
    other = compare_networks(student, model, [(PICTURES, None)])
    assert other.kept is None
    assert other.error > 0
    assert compare_networks(teacher("timm SAM"), teacher("timm SAM"), [(PICTURES, None)]).cosine == pytest.approx(1)
    with pytest.raises(SubquadError, match="no images"):
        compare_networks(model, model, [])


def test_simple_classifiers_of_features():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = torch.randn(60, 8, generator=generator) * 0.3 + torch.eye(3, 8)[labels] * 4
    assert torch.equal(nearest_neighbours(features[:45], labels[:45], features[45:]), labels[45:])
    assert torch.equal(linear_probe(features[:45], labels[:45], features[45:]), labels[45:])


def test_advice_says_the_ceiling_and_what_is_reached():
    def make(px):
        return timm.create_model("vit_tiny_patch16_224", img_size=px, embed_dim=48, depth=2, num_heads=4)

    advice = advise(make, [(64, 64), (64, 96)], ["linear"], repeats=1)
    assert advice.ceilings == {(64, 64): 1 + 17 / 288, (64, 96): 1 + 25 / 288}
    assert [row.attention for row in advice.rows] == ["", "nothing", "linear"] * 2
    assert advice.rows[0].gain == 1
    assert advice.rows[1].of_ceiling == 1
    assert all(len(line) <= 80 for line in advice.text.splitlines())
    # of all, but for those that refuse its class token
    said = []
    advice = advise(make, [(64, 64)], repeats=1, log=said.append)
    fitting = [name for name, cls in ATTENTION.items() if not cls.traits.quadratic and not refuses(name, "prefix")]
    assert [row.attention for row in advice.rows] == ["", "nothing", *fitting]
    assert [line.partition(" ")[0] for line in said if "is left out: " in line] == [
        name for name in ATTENTION if refuses(name, "prefix")
    ]
    half = advise(make, [(64, 64)], ["linear"], blocks=[0], repeats=1)
    # of 12nc² + 2n²c in two blocks, 2n²c of one is saved
    block, mixing = 12 * 17 * 48**2, 2 * 17**2 * 48
    assert half.ceilings[64, 64] == pytest.approx(2 * (block + mixing) / (2 * block + mixing), rel=1e-12)
    assert "by counting products, 1 + n/(6c) in 1 of 2 blocks, at most" in half.text
    assert "1 of 2 blocks" in half.text


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("adapted", [False, True])
def test_networks_of_other_channels_are_timed_and_counted(channels, adapted):
    def make(px):
        sizes = {"img_size": px, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 5}
        if not adapted:
            return timm.create_model("vit_tiny_patch16_224", in_chans=channels, **sizes)
        return nn.Sequential(nn.Conv2d(channels, 3, 1), timm.create_model("vit_tiny_patch16_224", **sizes))

    model = make((64, 64)).eval()
    student = subquad.convert(model, "linear", img_size=64)
    images = torch.randn(2, channels, 64, 64)
    damages = sensitivity(student, model, [images])
    assert all(row.ms for row in trade_off(student, model, [images], damages, at=(64, 64), repeats=1))
    check_sizes(model, [64])
    assert measure_costs(student, model, [64], repeats=1)[0].gain > 0
    assert len(advise(make, [(64, 64)], ["linear"], repeats=1).rows) == 3
    assert timed_here({"": model}, "PyTorch", "fp32", (64, 64), 1, Path())[0].ms
    assert count_macs(model, (64, 64)) == count_macs_of(model, images[:1])


def test_landmarks_as_many_as_tokens_are_softmax_and_fewer_are_near():
    """With every token a landmark of its own the product of the three maps is the map itself."""
    model = sharp("timm ViT")
    expected = answer(model, PICTURES)
    assert torch.allclose(answer(convert_without_training(model, (4, 4)), PICTURES), expected, rtol=1e-3, atol=1e-3)
    few = convert_without_training(model, (2, 2))
    assert not torch.allclose(answer(few, PICTURES), expected, rtol=1e-3, atol=1e-3)
    assert answer(few, torch.randn(1, 3, 96, 80)).isfinite().all()
    assert torch.equal(answer(subquad.restore(few), PICTURES), expected)


def test_landmarks_are_computed_in_the_precision_of_the_tokens():
    grid = TokenGrid(3, 6, prefix=1)
    q, k, v = torch.randn(3, 1, 4, grid.num_tokens, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # two rows and three columns of landmarks, whose rows overlap, and the class token
    bins = [[0, 1], [1, 2]], [[0, 1], [2, 3], [4, 5]]
    places = [[1 + 6 * y + x for y in rows for x in columns] for rows in bins[0] for columns in bins[1]]

    def pooled(tokens):
        return torch.stack([tokens[:, :, 0], *(tokens[:, :, place].mean(2) for place in places)], dim=2)

    def soft(a, b):
        return (a @ b.mT / 12**0.5).softmax(-1)

    inverse = torch.linalg.pinv(soft(pooled(q), pooled(k)))
    expected = soft(q, pooled(k)) @ inverse @ soft(pooled(q), k) @ v
    answered = NystromAttention((2, 3))(q, k, v, grid=grid, kv_grid=grid)
    torch.testing.assert_close(answered, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["timm ViT", "our DeiT"])
def test_weights_that_layers_share_stay_shared(name):
    model = teacher(name)
    first, second = (layer for path, layer in model.named_modules() if path.endswith("attn"))
    second.qkv.weight, second.proj = first.qkv.weight, first.proj
    model.tied = nn.Linear(1, 1)
    model.tied.bias = first.proj.bias
    student = subquad.convert(model, "linear")
    one, other = converted_layers(student).values()
    assert one.qkv.weight is other.qkv.weight is not first.qkv.weight and one.qkv.bias is not other.qkv.bias
    assert one.proj.weight is other.proj.weight and one.proj.bias is other.proj.bias is student.tied.bias
    assert answer(subquad.restore(student), PICTURES).equal(answer(model, PICTURES))


def test_a_restored_network_says_how_it_was_made_and_learns_as_it_did(tmp_path):
    model = teacher("our DeiT")
    made = dict(model.creation)
    student = subquad.convert(model, "agent")
    assert student.creation is None
    student.reset_classifier(7)
    student.set_input_size((96, 64))
    back = subquad.restore(student, strict=False)
    assert made.items() <= {**back.creation, "img_size": made["img_size"], "num_classes": made["num_classes"]}.items()
    subquad.save_weights(back, tmp_path / "back.safetensors")
    again = subquad.restore_model(tmp_path / "back.safetensors")[0]
    images = torch.randn(2, 3, 96, 64)
    torch.testing.assert_close(again.eval()(images), back(images))
    frozen = subquad.restore(subquad.optimize(subquad.convert(model, "agent")))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    learning = subquad.restore(subquad.convert(frozen, "agent").requires_grad_(True))
    assert all(parameter.requires_grad for parameter in learning.parameters())


def test_networks_that_no_arguments_make_say_so_in_their_files(tmp_path):
    for number, change in enumerate((lambda m: m.prune_intermediate_layers([0]), lambda m: subquad.join_frames(m, 2))):
        model = teacher("our DeiT")
        change(model)
        subquad.save_weights(model, file := tmp_path / f"{number}.safetensors")
        with pytest.raises(SubquadError, match="does not say which network it holds"):
            subquad.restore_model(file)


def test_windows_that_get_softmax_have_no_biases_at_first():
    from hosts import small

    model = small("swin", "agent").eval()
    first, second = (subquad.convert(model, "softmax") for _ in range(2))
    tables = [value for name, value in first.state_dict().items() if "relative_bias" in name and ".inner." in name]
    assert tables and not any(bool(table.any()) for table in tables)
    assert torch.equal(first(PICTURES), second(PICTURES))


def test_blocks_that_are_left_as_they_were_are_in_the_mode_and_the_types_of_the_student():
    """Networks of timm are made in training; and students move to bf16."""
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", attn_drop_rate=0.5, proj_drop_rate=0.5, **sizes)
    student = subquad.convert(model, "linear")
    in_training = sensitivity(student, model, [PICTURES]), relative_errors(student, model, PICTURES)
    assert all(part.training for network in (student, model) for part in network.modules())
    student.eval()
    model.eval()
    assert in_training == (sensitivity(student, model, [PICTURES]), relative_errors(student, model, PICTURES))
    expected = answer(subquad.convert(model, "linear", blocks=[0]), PICTURES)
    one = hybrid(student, [0])
    assert not any(part.training for part in one.modules())
    torch.testing.assert_close(answer(one, PICTURES), expected)
    damages = sensitivity(student, model, [PICTURES])
    assert damages == sensitivity(student, model, [PICTURES])
    assert trade_off(student, model, [PICTURES], damages) == trade_off(student, model, [PICTURES], damages)
    half, whole = student.bfloat16(), model.bfloat16()
    assert {parameter.dtype for parameter in hybrid(half, [0]).parameters()} == {torch.bfloat16}
    assert answer(hybrid(half, [0]), PICTURES.bfloat16()).isfinite().all()
    assert len(sensitivity(half, whole, [PICTURES.bfloat16()])) == 3


class Wrapped(nn.Module):
    """A network of one's own around one of ours."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images)


def test_no_file_says_that_a_network_is_what_it_was_where_a_part_was_converted(tmp_path):
    # linear attention's entries are those of softmax attention
    file, made = tmp_path / "part.safetensors", dict(teacher("our DeiT").creation)
    student = subquad.convert(Wrapped(teacher("our DeiT")), "linear")
    subquad.save_weights(student.network, file)
    with pytest.raises(SubquadError, match="does not say which network it holds"):
        subquad.restore_model(file)
    assert subquad.restore(student).network.creation.items() >= made.items()
    segmenter = build_segmenter({**made, "num_classes": 0}, head="linear", num_classes=3)
    whole = dict(segmenter.creation)
    for part in (segmenter, segmenter.pyramid.backbone):
        subquad.convert(part, "linear", in_place=True)
        subquad.save_weights(segmenter, file)
        subquad.save_weights(segmenter.pyramid.backbone, tmp_path / "backbone.safetensors")
        for written in (file, tmp_path / "backbone.safetensors"):
            with pytest.raises(SubquadError, match="does not say which network it holds"):
                subquad.open_trained(written)
        subquad.restore(part)
        assert segmenter.creation["backbone"].items() >= whole["backbone"].items()


def test_the_teacher_of_a_file_that_was_written_of_a_folder_of_transformers_is_named(tmp_path):
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    teacher = NetworkOfTransformers(ViTModel(ViTConfig(**sizes, num_hidden_layers=1)).eval())
    save_converted(subquad.convert(teacher, "linear"), tmp_path / "a.safetensors")
    load_converted(tmp_path / "a.safetensors", teacher)
    with pytest.raises(SubquadError, match=r"its teacher is subquad\.open_trained\(folder\)\.model"):
        load_converted(tmp_path / "a.safetensors", teacher.network)
