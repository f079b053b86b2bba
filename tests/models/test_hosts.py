"""Every host with every mechanism: sizes, gradients, and what timm's models offer."""

import copy
import warnings

import pytest
import torch
from hosts import CLASSES, SMALL, drawn, fewest, paired, small
from mechanisms import assert_refused, refuses
from safetensors.torch import load_file

import subquad
from subquad import ATTENTION, SubquadError
from subquad.grid import TokenGrid
from subquad.models import VARIANTS
from subquad.models.mlla_network import MambaLikeAttention
from subquad.models.pvt import SpatialReductionAttention
from subquad.models.restoring import restore_model
from subquad.models.swin import WindowAttention
from subquad.models.vit import Plain
from subquad.models.windows import border_mask
from subquad.positions import GridTable
from subquad.tasks.backbone_arguments import build_backbone
from subquad.tasks.segmentation.segmenters import build_segmenter

every_host = pytest.mark.parametrize("host", SMALL)
every_mechanism = pytest.mark.parametrize("attention", ATTENTION)
every_pair = pytest.mark.parametrize(("host", "attention"), paired(SMALL, ATTENTION))
PYRAMIDS = [host for host in SMALL if not issubclass(CLASSES[host], Plain)]


def with_random_tables(model):
    """A model whose tables, zeros at first in some mechanisms, say something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, GridTable):
                for parameter in module.parameters():
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@every_pair
@torch.no_grad()
def test_images_of_any_size_go_through(host, attention):
    model = small(host, attention).eval()
    for size in ((64, 64), (75, 50), (40, 131)):
        y = model(torch.randn(2, 3, *size))
        assert y.shape == (2, 5) and y.isfinite().all(), size
        rows, columns = (-(-side // 32) for side in size)
        if host in PYRAMIDS:
            last = model.forward_intermediates(torch.randn(1, 3, *size))[1][-1]
            assert last.shape[2:] == (rows, columns), size


@every_host
@torch.no_grad()
def test_no_images_have_no_logits(host):
    assert small(host, "agent").eval()(torch.randn(0, 3, 75, 50)).shape == (0, 5)


@every_host
@torch.no_grad()
def test_projections_are_called_where_somebody_listens(host):
    model, images, called = small(host).eval(), torch.randn(1, 3, 64, 64), []
    projections = {name: module for name, module in model.named_modules() if name.endswith("attn.qkv")}
    hooks = [
        module.register_forward_hook(lambda _, __, y, name=name: [called.append(name), 2 * y][1])
        for name, module in projections.items()
    ]
    heard = model(images)
    assert list(dict.fromkeys(called)) == list(projections)
    for hook, module in zip(hooks, projections.values(), strict=True):
        hook.remove()
        for parameter in module.parameters():
            parameter *= 2
    torch.testing.assert_close(model(images), heard)


@every_host
@torch.no_grad()
def test_what_listens_to_layers_of_pytorchs_is_heard(host):
    model, image = drawn(small(host)).eval(), torch.randn(1, 3, 64, 64)
    # the last of each name and kind
    layers = {
        (path.rpartition(".")[2], type(one)): (path, one)
        for path, one in model.named_modules()
        if type(one).__module__.startswith("torch.nn") and list(one.parameters(recurse=False))
    }
    for path, layer in layers.values():
        handle = layer.register_forward_hook(lambda part, given, y: 2 * y)
        heard = model(image)
        handle.remove()
        for parameter in layer.parameters():
            parameter *= 2
        torch.testing.assert_close(heard, model(image), msg=path)
        for parameter in layer.parameters():
            parameter /= 2


@every_host
def test_changes_of_low_rank_are_learned_in_every_projection(host):
    peft = pytest.importorskip("peft")
    model = small(host).eval()
    names = [name for name, module in model.named_modules() if name.endswith("attn.qkv")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False), model)
    model(torch.randn(1, 3, 64, 64)).square().sum().backward()
    changes = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    assert len(changes) == 2 * len(names)
    assert not [name for name, parameter in changes.items() if parameter.grad is None]


@every_pair
def test_an_image_does_not_see_the_others_of_its_batch(host, attention):
    model = small(host, attention).double().eval()
    images = torch.randn(3, 3, 70, 44, dtype=torch.float64)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]))


@every_pair
def test_one_training_step_reaches_every_parameter(host, attention):
    model = small(host, attention, drop_path_rate=0.1, drop_rate=0.1).train()
    model(torch.randn(4, 3, 64, 64)).square().mean().backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]


@every_host
def test_gradient_checkpointing_changes_memory_not_gradients(host):
    model, x = small(host, "softmax"), torch.randn(2, 3, 64, 64)

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(5)
@every_pair
def test_a_model_moved_to_another_size_computes_what_it_computed_there_before(host, attention):
    model = with_random_tables(small(host, attention)).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    images = torch.randn(1, 3, 96, 128, dtype=torch.float64)
    before = model(images)
    moved = copy.deepcopy(model)
    moved.set_input_size((96, 128))
    assert moved.img_size == (96, 128)
    assert not [key for key, parameter in moved.named_parameters() if parameter.requires_grad]
    torch.testing.assert_close(moved(images), before)


@pytest.mark.parametrize(("host", "attention"), [*((h, "agent") for h in SMALL), *(("pvt", a) for a in ATTENTION)])
@torch.no_grad()
def test_a_model_moved_to_another_size_is_that_from_its_file(host, attention, tmp_path):
    """Windows, agents, landmarks and blocks are those of the size that it was made for first."""
    images = torch.randn(1, 3, 32, 160)
    model = drawn(small(host, attention, **fewest(host)))
    for size in ((96, 64), (32, 160)):
        model.set_input_size(size)
    subquad.save_weights(model, tmp_path / "moved.safetensors")
    restored, note = restore_model(tmp_path / "moved.safetensors")
    assert torch.equal(restored.eval()(images), model(images))
    assert restored.creation == note["creation"] == model.creation
    # and again, from the network that was restored
    model.set_input_size(64)
    restored.set_input_size(64)
    assert torch.equal(restored(images), model(images)) and restored.creation == model.creation


@pytest.mark.parametrize("host", ["swin", "cswin"])
@torch.no_grad()
def test_windows_stay_where_a_model_moves_and_opens_again(host, tmp_path):
    model = drawn(small(host, **fewest(host)))
    images = torch.randn(1, 3, 320, 320)
    model.set_input_size(320)
    subquad.save_weights(model, tmp_path / "moved.safetensors")
    assert torch.equal(restore_model(tmp_path / "moved.safetensors")[0].eval()(images), model(images))
    # windows of 10 there, as published
    assert not torch.equal(small(host, img_size=320, **fewest(host)).eval()(images), model(images))


@pytest.mark.parametrize("attention", sorted(ATTENTION))
@pytest.mark.parametrize("host", ["pvt", "pvt_v2"])
def test_tables_of_reduced_keys_move_with_them(host, attention):
    sizes = {"sr_ratio": [4, 2, 2, 1]}
    if refuses(attention, "kv_grid"):
        assert_refused(attention, lambda: small(host, attention, **sizes), "kv_grid")
        return
    model = with_random_tables(small(host, attention, **sizes)).double().eval()
    images = torch.randn(1, 3, 96, 128, dtype=torch.float64)
    before = model(images)
    model.set_input_size((96, 128))
    torch.testing.assert_close(model(images), before)
    made = small(host, attention, img_size=(96, 128), **sizes)
    assert {key: t.shape for key, t in model.state_dict().items()} == {k: t.shape for k, t in made.state_dict().items()}


@pytest.mark.thinned(5)
@every_pair
def test_weights_of_another_image_size_are_resampled_and_of_the_same_size_taken_exactly(host, attention):
    model = with_random_tables(small(host, attention)).eval()
    same, larger = small(host, attention).eval(), small(host, attention, img_size=128).eval()
    assert not subquad.load_checkpoint(same, model.state_dict()).resized
    loaded = same.state_dict()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())
    if attention == "soft":
        return  # a landmark is a convolution, whose window is sized at construction
    resized = subquad.load_checkpoint(larger, model.state_dict()).resized
    tables = {name for name, module in model.named_modules() if isinstance(module, GridTable)}
    assert {name.rpartition(".")[0] for name in resized} <= tables
    assert larger(torch.randn(1, 3, 128, 128)).isfinite().all()


@pytest.mark.thinned(5)
@every_pair
def test_files_say_on_which_grid_their_tables_stand(host, attention, tmp_path):
    """Of 4 × 16 tokens and of 8 × 8 a table has as many: a file of ours says for which images its network is."""
    shallow = fewest(host)
    model = with_random_tables(small(host, attention, img_size=(32, 128), **shallow)).eval()
    subquad.save_weights(model, tmp_path / "oblong.safetensors")
    for size in ((48, 192), (64, 64), (128, 32)):
        if attention == "soft" and not CLASSES[host].is_plain:
            continue  # windows of landmarks are those of the grid of construction
        fresh, moved = small(host, attention, img_size=size, **shallow).eval(), copy.deepcopy(model)
        if size != (48, 192) and any(hasattr(module, "differs_on") for module in fresh.modules()):
            # what is learned of blocks means others here
            with pytest.raises(SubquadError, match=r"blocks of .* here: create the model with built_for=\(32, 128\)"):
                subquad.load_checkpoint(fresh, tmp_path / "oblong.safetensors")
            fresh = small(host, attention, img_size=size, built_for=(32, 128), **shallow).eval()
        moved.set_input_size(size)
        subquad.load_checkpoint(fresh, tmp_path / "oblong.safetensors")
        images = torch.randn(1, 3, *size)
        torch.testing.assert_close(fresh(images), moved(images), rtol=1e-4, atol=1e-5)


def test_backbones_of_dense_files_and_converted_files_stand_on_their_grids_too(tmp_path):
    shape = {"name": "deit_tiny", "embed_dim": 16, "num_heads": 2, "depths": [12]}
    made = build_segmenter({**shape, "img_size": [64, 256]}, head="linear", num_classes=3)
    backbone, file = made.pyramid.backbone, tmp_path / "dense.safetensors"
    subquad.save_weights(made, file)
    subquad.save_weights(backbone, tmp_path / "oblong.safetensors")
    moved = copy.deepcopy(backbone)
    moved.set_input_size((128, 128))
    table = moved.state_dict()["stages.0.pos_embed.table"]

    begun = build_backbone({**shape, "img_size": (128, 128), "checkpoint": str(file)})
    torch.testing.assert_close(begun.state_dict()["stages.0.pos_embed.table"], table)
    other = build_segmenter({**shape, "img_size": [128, 128]}, head="linear", num_classes=3)
    subquad.load_checkpoint(other, file)
    torch.testing.assert_close(other.state_dict()["pyramid.backbone.stages.0.pos_embed.table"], table)
    sizes = {"embed_dim": 16, "num_heads": 2, "img_size": 128}
    subquad.convert_checkpoint(tmp_path / "oblong.safetensors", tmp_path / "square.safetensors", **sizes)
    torch.testing.assert_close(load_file(tmp_path / "square.safetensors")["stages.0.pos_embed.table"], table)


@every_host
def test_features_end_where_their_level_does(host):
    model = small(host).eval()
    x = torch.randn(2, 3, 64, 96)
    final, maps = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    assert [level.shape[1] for level in maps] == [info["num_chs"] for info in model.feature_info]
    for level, info in zip(maps, model.feature_info, strict=True):
        assert level.shape[2:] == (64 // info["reduction"], 96 // info["reduction"])
    for i, level in enumerate(maps):
        pruned = copy.deepcopy(model)
        assert pruned.prune_intermediate_layers([i], prune_norm=True) == [i]
        torch.testing.assert_close(pruned.forward_intermediates(x, indices=[i], intermediates_only=True)[0], level)
        pruned.train().forward_features(x).sum().backward()
        assert not [key for key, parameter in pruned.named_parameters() if parameter.grad is None]
    last = model.forward_intermediates(x, indices=1, stop_early=True, output_fmt="NLC", intermediates_only=True)
    assert last[0].shape[1] == maps[-1].shape[2] * maps[-1].shape[3]


@every_host
@torch.no_grad()
def test_a_pruned_network_counts_the_levels_that_it_has(host):
    model, x = small(host).eval(), torch.randn(1, 3, 64, 64)
    maps = model.forward_intermediates(x, intermediates_only=True)
    for i in range(len(maps)):
        for norm, head in ((False, False), (True, False), (True, True)):
            pruned = copy.deepcopy(model)
            pruned.prune_intermediate_layers([i], prune_norm=norm, prune_head=head)
            final, left = pruned.forward_intermediates(x)
            torch.testing.assert_close(left, maps[: i + 1])
            for indices in (1, [-1]):
                of_last = pruned.forward_intermediates(x, indices=indices, intermediates_only=True)
                torch.testing.assert_close(of_last, maps[i : i + 1])
            # whatever was dropped, its parts fit each other
            torch.testing.assert_close(final, pruned.forward_features(x))
            assert final.shape[-1] == pruned.num_features and pruned(x).isfinite().all()
            if host not in PYRAMIDS:
                assert torch.equal(pruned.head.weight, model.head.weight) if not head else pruned.num_classes == 0


@pytest.mark.parametrize("host", sorted(set(SMALL) - set(PYRAMIDS)))
@torch.no_grad()
def test_final_features_of_a_plain_network_are_normed_wherever_it_ends(host):
    model, x = small(host).eval(), torch.randn(1, 3, 64, 64)
    final, maps = model.forward_intermediates(x, indices=[0], norm=True, output_fmt="NLC", stop_early=True)
    torch.testing.assert_close(final.flatten(1, -2)[:, model.prefix :], maps[0])


@every_host
@torch.no_grad()
def test_prefix_tokens_and_dictionaries_as_timm_gives_them(host):
    model, x = small(host).eval(), torch.randn(2, 3, 64, 64)
    final, maps = model.forward_intermediates(x)
    asked = {"return_prefix_tokens": True, "intermediates_only": True}
    levels = model.forward_intermediates(x, **asked)
    given = model.forward_intermediates(x, output_dict=True, return_prefix_tokens=True)
    torch.testing.assert_close((given["image_features"], given["image_intermediates"]), (final, maps))
    assert ("image_intermediates_prefix" in given) == (model.prefix > 0)
    if model.prefix:
        torch.testing.assert_close(levels, list(zip(maps, given["image_intermediates_prefix"], strict=True)))
        normed = model.forward_intermediates(x, indices=1, norm=True, **asked)[0]
        torch.testing.assert_close(normed[1], model.forward_features(x)[:, : model.prefix])
    else:
        torch.testing.assert_close(levels, maps)
    assert model.forward_intermediates(x, output_dict=True, intermediates_only=True).keys() == {"image_intermediates"}


@every_host
def test_the_head_is_replaced_on_the_networks_device_and_dtype(host):
    model = small(host).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    model.reset_classifier(11)
    assert model.num_classes == 11 and model(x).shape == (1, 11)
    model.reset_classifier(0, "max")
    assert model(x).shape == (1, model.num_features)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), model.fc_norm(model.forward_features(x)))
    with pytest.raises(SubquadError, match="unknown global_pool 'mean'"):
        model.reset_classifier(3, "mean")


@every_host
@torch.no_grad()
def test_a_network_that_was_changed_is_opened_as_it_is_now(host, tmp_path):
    model, x = with_random_tables(small(host)).eval(), torch.randn(1, 3, 96, 64)
    for change in (
        lambda: model.set_input_size((96, 64)),
        lambda: model.reset_classifier(7, "max"),
        lambda: model.reset_classifier(5, "avg"),
        lambda: model.reset_classifier(0, ""),
    ):
        change()
        subquad.save_weights(model, tmp_path / "changed.safetensors")
        opened, _ = restore_model(tmp_path / "changed.safetensors")
        assert opened.creation == model.creation and opened.img_size == model.img_size
        torch.testing.assert_close(opened.eval()(x), model(x))


@pytest.mark.parametrize("host", ["lavit", "lavit_vit"])
def test_a_walk_that_stops_early_leaves_no_loss_of_another_pass(host):
    model, x = small(host).train(), torch.randn(2, 3, 64, 64)
    model(x)
    assert model.auxiliary_loss() > 0
    model.forward_intermediates(x, indices=[0], stop_early=True)
    assert model.auxiliary_loss() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.set_input_size(0), "img_size must be .* of at least 1.*, got 0"),
        (lambda model: model.set_input_size((96, 64, 3)), r"a list of 2 whole numbers .* got \(96, 64, 3\)"),
        (lambda model: model.set_input_size(96.5), "img_size must be a whole number .* got 96.5"),
        (lambda model: model.reset_classifier(-1), "num_classes must be a whole number of at least 0, got -1"),
        (lambda model: model.reset_classifier("5"), "num_classes must be a whole number of at least 0, got '5'"),
    ],
)
def test_numbers_that_a_network_can_not_be_changed_to_leave_it_as_it_was(change, message):
    model = small("vit")
    with pytest.raises(SubquadError, match=message):
        change(model)
    assert model.img_size == (64, 64) and model.head.out_features == model.num_classes == 5


@every_host
def test_layer_groups_and_undecayed_parameters_exist(host):
    from timm.models._manipulate import group_parameters

    model = small(host)
    names = {key for key, _ in model.named_parameters()}
    assert model.no_weight_decay() <= names
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse), reverse=True)
        assert set(groups) == names and len(set(groups.values())) > 1
        # all that stands in a stage is nearer to the image than the head is
        assert max(group for name, group in groups.items() if name.startswith("stages")) < groups["head.weight"]


@pytest.mark.parametrize("host", ["vit", "swin", "lavit_vit"])
@pytest.mark.filterwarnings("ignore")  # that TorchScript is deprecated
def test_torchscript_is_refused_with_what_to_take_instead(host):
    model, x = small(host).eval(), torch.randn(1, 3, 64, 64)
    detector = torch.nn.Sequential(model, torch.nn.ReLU())
    for call in (lambda: torch.jit.trace(detector, x), lambda: torch.jit.script(detector)):
        with pytest.raises(SubquadError, match=r"subquad.export\(model, path, format='pt2'\)"):
            call()


@pytest.mark.thinned(8)
@pytest.mark.slow
@every_host
def test_the_whole_network_compiles_without_a_graph_break(host):
    model, x = small(host, **fewest(host)).eval(), torch.randn(2, 3, 72, 56)
    # hosts share code: of more than eight PyTorch compiles none, and sizes that differ would be symbols, for minutes
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.thinned(4)
@pytest.mark.slow
@every_host
def test_the_whole_network_exports_for_any_batch(host):
    model = small(host, **fewest(host)).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 64, 64),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(5, 3, 64, 64)
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_convolutions_of_pvt_v2_start_as_released():
    model = small("pvt_v2", "focused", embed_dims=(32, 64, 96, 128), sr_ratio=[2, 2, 1, 1])
    block = model.stages[1].blocks[0]
    variances = {
        model.stages[1].embed.proj: 2 / (9 * 64),
        block.attn.reduce.proj: 2 / (4 * 64),
        block.mlp.dwconv: 2 / 9,
        block.attn.inner.local: 2 / 25,
    }
    for module, variance in variances.items():
        assert module.weight.var().item() == pytest.approx(variance, rel=0.3)
        assert module.bias.count_nonzero() == 0


def test_layer_groups_count_a_stages_norm_with_its_last_block():
    from timm.models._manipulate import group_parameters

    model = small("pvt_v2")
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert (
        groups["stages.1.norm.weight"] == groups["stages.1.blocks.1.norm1.weight"] < groups["stages.2.embed.norm.bias"]
    )


def test_a_mechanism_without_masks_is_refused_shifted_windows():
    with pytest.raises(SubquadError, match="shifted windows of 7×7 need a mechanism that honours a mask"):
        small("swin", "agent", window_size=[7, 7, 7, 7])
    assert small("swin", "agent", window_size=[7, 7, 7, 7], shift=False)(torch.randn(1, 3, 64, 64)).shape == (1, 5)


def test_padding_is_refused_where_it_would_be_dropped():
    grid, x = TokenGrid(8, 8), torch.randn(1, 64, 12)
    padding = torch.zeros(1, 64, dtype=torch.bool)
    window = WindowAttention(12, 2, ATTENTION["softmax"], grid=grid, window_size=4)
    reduced = SpatialReductionAttention(12, 2, ATTENTION["softmax"], grid=grid, sr_ratio=2)
    mamba = MambaLikeAttention(12, 2, ATTENTION["softmax"], grid=grid)
    refusals = ((window, "windows of 4×4 take no padding"), (reduced, "reduced 2 times"), (mamba, "by a convolution"))
    for layer, message in refusals:
        assert layer(x, grid=grid).shape == x.shape
        with pytest.raises(SubquadError, match=message):
            layer(x, grid=grid, padding=padding)
    whole = WindowAttention(12, 2, ATTENTION["softmax"], grid=grid)
    torch.testing.assert_close(whole(x, grid=grid, padding=padding), whole(x, grid=grid))


def test_one_reach_is_for_quadratic_blocks_and_a_list_for_all():
    def windows(**settings):
        model = small("swin", ["linear", "softmax", "softmax", "linear"], **settings)
        return [[block.attn.window_size for block in stage.blocks] for stage in model.stages]

    assert windows() == [[None, None], [7], [7, 7], [None]]
    assert windows(window_size=5) == [[None, None], [5], [5, 5], [None]]
    assert windows(window_size=[None, 4, None, 2]) == [[None, None], [4], [None, None], [2]]
    assert windows(img_size=384) == [[None, None], [12], [12, 12], [None]]
    model = small("pvt", ["softmax", "linear", "softmax", "softmax"], sr_ratio=[2, 2, 1, 1])
    assert [block.attn.sr_ratio for stage in model.stages for block in stage.blocks] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize(
    ("host", "settings", "message"),
    [
        ("swin", {"num_heads": (3, 6, 12)}, "num_heads has 3 entries for 4 stages"),
        ("swin", {"window_size": [7, 7]}, "window_size has 2 entries for 4 stages and 6 blocks"),
        ("swin", {"window_size": 0}, "window_size must be .* of at least 1, got .0"),
        ("cswin", {"split_size": 0}, "split_size must be .* of at least 1, got .0"),
        ("cswin", {"num_heads": (1, 2, 4, 4)}, "even number of heads and channels, got 1 and 16"),
        ("pvt", {"sr_ratio": 0}, "sr_ratio must be .* of at least 1, got .0"),
        ("vit", {"global_pool": "token", "class_token": False}, "this network has none"),
        ("vit", {"global_pool": "token", "class_token": False, "reg_tokens": 2}, "this network has none"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(host, settings, message):
    with pytest.raises(SubquadError, match=message) as caught:
        small(host, **settings)
    assert "\n" not in str(caught.value)


def test_registers_are_no_class_token_to_read():
    model = small("vit", class_token=False, reg_tokens=2)
    with pytest.raises(SubquadError, match="reads the class token, and this network has none"):
        model.reset_classifier(3, "token")


@pytest.mark.parametrize("stages", [1, 3, 5])
@pytest.mark.parametrize("name", sorted(name for name, variant in VARIANTS.items() if len(variant.depths) > 1))
def test_as_many_stages_as_the_sizes_have_entries(name, stages):
    with pytest.raises(SubquadError, match=f" has 4 entries for {stages} stages: give one for each"):
        subquad.create_model(name, depths=[1] * stages, device="meta")


def test_windows_brought_together_by_the_shift_do_not_attend_to_each_other():
    window, shift = TokenGrid(4, 4), (2, 2)
    mask = border_mask(3, 2, window, shift, torch.device("cpu"))
    # where each token of the shifted map came from
    home = torch.arange(12 * 8).reshape(12, 8).roll((-2, -2), dims=(0, 1))
    for r in range(3):
        for column in range(2):
            tokens = home[4 * r : 4 * r + 4, 4 * column : 4 * column + 4].flatten()
            near = ((tokens[:, None] // 8 - tokens // 8).abs() < 4) & ((tokens[:, None] % 8 - tokens % 8).abs() < 4)
            assert torch.equal(mask[2 * r + column], ~near)


@pytest.mark.parametrize("host", ["pvt", "pvt_v2", "swin", "cswin"])
def test_networks_of_fewer_stages_take_the_last_settings(host):
    sizes = {"embed_dims": (8, 16, 32)} if host.startswith("pvt") else {}
    heads = {"swin": (1, 2, 3), "cswin": (2, 2, 4)}.get(host, (1, 2, 4))
    ratios = {"mlp_ratios": (4, 4, 4)} if host.startswith("pvt") else {}
    model = small(host, "agent", depths=(1, 1, 1), num_heads=heads, **sizes, **ratios)
    assert [stage.blocks[0].attn.regrid is not None for stage in model.stages] == [True] * 3
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("host", ["vit", "pvt", "pvt_v2", "swin", "cswin"])
@every_mechanism
def test_projections_may_go_without_bias(host, attention):
    model = small(host, attention, qkv_bias=False)
    assert not [key for key, _ in model.named_parameters() if key.endswith("qkv.bias")]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_host
def test_half_precision_takes_images_of_other_sizes_and_stays_near(host, dtype):
    model, x = small(host).eval(), torch.randn(2, 3, 75, 50)
    with torch.no_grad():
        exact = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x).float() - exact).norm() <= 0.05 * exact.norm()
        half = model.to(dtype)(x.to(dtype))
    assert half.dtype == dtype and (half.float() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("host", SMALL)
def test_several_networks_are_computed_as_one(host):
    """PyTorch's recipe for ensembles: `stack_module_state`, and `vmap` over the stacked parameters."""
    networks = [drawn(small(host)), drawn(small(host))]
    images = torch.randn(2, 3, 64, 64)
    parameters, buffers = torch.func.stack_module_state(networks)

    def called(*state):
        return torch.func.functional_call(networks[0], state, (images,))

    answers = torch.vmap(called)(parameters, buffers)
    for network, answer in zip(networks, answers, strict=True):
        expected = network(images)
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    answers.square().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in parameters.values())
