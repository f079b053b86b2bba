"""What networks are built of, number by number: depth, drop, tables, reach, heads and pools."""

import pytest
import torch
from hosts import CLASSES, SMALL, small
from timm.layers import DropPath
from torch import nn

import subquad
from subquad import ATTENTION
from subquad.grid import TokenGrid
from subquad.models import HOSTS
from subquad.models.attention_names import parse_attention
from subquad.models.backbone import grids_of
from subquad.models.cswin import CrossShapedAttention, CrossShapedBlock
from subquad.models.layers import Block, SelfAttention, init_linear, move_tables
from subquad.models.less_attention import AttentionResidual, diagonality_loss
from subquad.models.softnet import PostNormBlock
from subquad.models.stages import by_stage, drop_path_rates, fill_up
from subquad.models.swin import PatchMerging, WindowAttention
from subquad.models.timm_settings import default_cfg
from subquad.models.vit import Plain
from subquad.positions import BiasTables, GridBias, PositionTable
from subquad.tasks.sequences.sequence_network import create_sequence_model
from subquad.weights.files import read_weights

every_host = pytest.mark.parametrize("host", SMALL)


def dropped(block):
    """How often a block's branches are dropped."""
    return {DropPath: "drop_prob", nn.Dropout: "p"}.get(type(block.drop_path)) and (
        block.drop_path.drop_prob if isinstance(block.drop_path, DropPath) else block.drop_path.p
    )


@every_host
def test_stochastic_depth_rises_with_the_depth_from_nothing_to_its_rate(host):
    network = small(host, drop_path_rate=0.3)
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    rates = [dropped(block) or 0.0 for block in blocks]
    assert rates == pytest.approx([0.3 * k / (len(rates) - 1) for k in range(len(rates))])


def test_rates_and_blocks_are_cut_into_stages_in_their_order():
    assert [len(part) for part in drop_path_rates(0.5, (1, 3, 2))] == [1, 3, 2]
    assert [rate for part in drop_path_rates(0.5, (1, 3, 2)) for rate in part] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    )
    assert by_stage("abcdef", (1, 3, 2)) == [["a"], ["b", "c", "d"], ["e", "f"]]


@every_host
def test_dropout_stands_where_it_is_asked_for(host):
    network = small(host, drop_rate=0.4)
    assert network.head_drop.p == 0.4
    for block in (module for module in network.modules() if isinstance(module, Block)):
        assert {layer.p for layer in block.mlp.modules() if isinstance(layer, nn.Dropout)} == {0.4}
    # CSwin, as released, has none in front of its blocks
    rate = 0.0 if host == "cswin" else 0.4
    tokens = network.stages[0].train().tokens_of(torch.randn(1, 3, 64, 64))[0]
    assert (tokens == 0).float().mean() == pytest.approx(rate, abs=0.1)


class Twice(nn.Module):
    def forward(self, x, *, grid):
        return 2 * x


def test_a_block_adds_what_its_branches_make_of_normed_tokens():
    block = Block(8, Twice()).eval()
    nn.init.normal_(block.norm2.weight)
    x = torch.randn(2, 5, 8)
    middle = x + 2 * block.norm1(x)
    torch.testing.assert_close(block(x, grid=TokenGrid(1, 5)), middle + block.mlp(block.norm2(middle)))
    late = PostNormBlock(8, Twice(), drop_path=0.2).eval()
    middle = late.norm1(3 * x)
    torch.testing.assert_close(late(x, grid=TokenGrid(1, 5)), late.norm2(middle + late.mlp(middle)))
    assert late.mlp.act.approximate == "tanh" and late.drop_path.p == 0.2


def test_softs_network_is_post_norm_but_for_its_last_stage():
    kinds = [{type(block) for block in stage.blocks} for stage in small("softnet").stages]
    assert kinds == [{PostNormBlock}] * 3 + [{Block}]


def test_maps_are_filled_up_below_and_on_the_right():
    filled = fill_up(torch.ones(1, 1, 3, 5), 4)
    assert filled.shape == (1, 1, 4, 8) and filled[0, 0, :3, :5].all() and filled.sum() == 15
    assert [grid.shape for grid in grids_of((37, 64), 4, 3)] == [(10, 16), (5, 8), (3, 4)]


def test_linear_layers_start_small_and_without_bias():
    layer = nn.Linear(64, 64)
    init_linear(layer)
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1) and not layer.bias.any()


def test_prefix_tokens_stand_first_and_positions_are_added():
    stage = subquad.create_model("deit_tiny", img_size=32, depths=(1,), embed_dim=12, num_heads=2).stages[0].eval()
    with torch.no_grad():
        tokens, grid = stage.tokens_of(torch.randn(2, 3, 32, 32))
        table = stage.pos_embed(grid)[0]
        torch.testing.assert_close(tokens[:, 0], (stage.prefix_tokens[:, 0] + table[0]).expand(2, -1))
        bare = stage.embed(torch.zeros(1, 3, 32, 32)).flatten(2).mT
        torch.testing.assert_close(stage.tokens_of(torch.zeros(1, 3, 32, 32))[0][:, 1:], bare + table[1:])


def test_rows_of_prefix_tokens_are_kept_when_a_table_moves():
    table = PositionTable(2, 4, TokenGrid(3, 3, 2), std=1.0)
    own = table.table.detach().clone()
    for grid in (TokenGrid(5, 4, 2), TokenGrid(2, 2, 2)):
        assert torch.equal(table(grid)[:, :2], own[:, :2]) and table(grid)[:, 2:].abs().min() > 0
    stored = torch.randn(2, 2 + 16, 4)
    assert torch.equal(table.fitted("table", stored)[:, :2], stored[:, :2])
    table.regrid(TokenGrid(5, 4, 2))
    assert torch.equal(table.table[:, :2], own[:, :2])


@pytest.mark.parametrize("size", [(96, 64), (32, 32)])
def test_rows_of_prefix_tokens_are_kept_when_a_network_moves(size):
    model = subquad.create_model("deit_tiny", img_size=64, depths=(1,), embed_dim=12, num_heads=2, reg_tokens=2)
    table = model.stages[0].pos_embed
    before = table.table.detach().clone()
    model.set_input_size(size)
    assert model.img_size == size and table.grid.shape == (size[0] // 16, size[1] // 16)
    assert before[:, :3].any() and torch.equal(table.table[:, :3], before[:, :3])


def test_tables_of_agents_are_resampled_over_the_square_that_the_agents_are():
    bias = GridBias(1, TokenGrid(2, 2), TokenGrid(3, 3))
    with torch.no_grad():
        # agents differ from row to row and not from column to column
        for parameter in bias.parameters():
            parameter.copy_(torch.tensor([0.0, 0.0, 4.0, 4.0]).view(4, *[1] * (parameter.dim() - 2)))
    moved = bias.tables(TokenGrid(3, 3), TokenGrid(4, 4)).rows[0, :, 0].view(4, 4)
    assert torch.equal(moved, moved[:, :1].expand(4, 4)) and (moved[1:] >= moved[:-1]).all()


def test_tables_on_other_grids_stay_where_they_are():
    old, new, other = TokenGrid(3, 3), TokenGrid(5, 4), TokenGrid(2, 2)
    tables = nn.ModuleList(PositionTable(1, 4, grid, std=1.0) for grid in (old, other))
    move_tables(tables, {old: new})
    assert [table.grid for table in tables] == [new, other]


def test_a_bias_has_its_prefix_in_front():
    tables = BiasTables(torch.zeros(1, 2, 7, 7), torch.ones(1, 2, 2), torch.ones(1, 2, 3), torch.full((1, 2, 1), 5.0))
    assert tables.written_out()[0, 0].tolist() == [5.0] + [2.0] * 6


@pytest.mark.parametrize(("pool", "expected"), [("avg", 3.0), ("max", 5.0), ("token", 9.0)])
def test_pools_read_what_they_are_called_for(pool, expected):
    network = subquad.create_model(
        "deit_tiny", img_size=32, depths=(1,), embed_dim=12, num_heads=2, num_classes=0, global_pool=pool
    )
    features = torch.tensor([9.0, 1.0, 1.0, 5.0, 5.0])[None, :, None].expand(1, 5, 12)
    assert network.forward_head(features).unique().tolist() == [expected]


def test_levels_are_at_doubling_strides_and_only_the_last_has_the_final_norm():
    network = small("swin").eval()
    assert [info["reduction"] for info in network.feature_info] == [4, 8, 16, 32]
    nn.init.constant_(network.norm.bias, 3.0)
    x = torch.randn(1, 3, 64, 64)
    plain = network.forward_intermediates(x, intermediates_only=True)
    normed = network.forward_intermediates(x, norm=True, intermediates_only=True)
    assert [torch.equal(one, other) for one, other in zip(plain, normed, strict=True)] == [True] * 3 + [False]


@every_host
def test_tables_and_tokens_are_not_decayed(host):
    network = small(host)
    tables = {name for name, _ in network.named_parameters() if name.endswith(("prefix_tokens", "relative_bias.table"))}
    if issubclass(CLASSES[host], Plain) and network.stages[0].pos_embed is not None:
        tables |= {"stages.0.pos_embed.table"}
    assert tables <= network.no_weight_decay()


@every_host
def test_checkpointing_is_switched_on_and_off(host):
    network = small(host)
    for enable in (True, False):
        network.set_grad_checkpointing(enable)
        assert {stage.grad_checkpointing for stage in network.stages} == {enable}


def test_reach_is_the_published_one_by_stage_and_for_quadratic_mechanisms_alone():
    pvt = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 1, 1), "img_size": 64}
    ratios = {
        name: [
            stage.blocks[0].attn.sr_ratio for stage in subquad.create_model("pvt_tiny", attention=name, **pvt).stages
        ]
        for name in ("softmax", "linear")
    }
    assert ratios == {"softmax": [8, 4, 2, 1], "linear": [1, 1, 1, 1]}
    for depth, expected in ((2, [2, 1]), (5, [8, 8, 4, 2, 1])):
        sizes = {"embed_dims": (8,) * depth, "num_heads": (1,) * depth, "mlp_ratios": (2,) * depth}
        model = subquad.create_model("pvt_tiny", depths=(1,) * depth, img_size=64, **sizes)
        assert [stage.blocks[0].attn.sr_ratio for stage in model.stages] == expected
    for size, width in ((224, 7), (384, 12)):
        assert HOSTS["swin"].default_reach((size, size)) == {"window_size": (width,) * 4}
        assert HOSTS["cswin"].default_reach((size, size)) == {"split_size": (1, 2, width, width)}
    swin = small("swin", depths=(2, 2, 2, 2), img_size=448)
    assert [[block.attn.shifted for block in stage.blocks] for stage in swin.stages] == [[False, True]] * 4
    cswin = small("cswin", img_size=448)
    widths = [stage.blocks[0].attn.split_size for stage in cswin.stages]
    assert widths == [1, 2, 14, None]
    # the last stage has one stripe though the grid is longer than a stripe is wide
    assert small("cswin", img_size=(64, 512)).stages[-1].blocks[0].attn.split_size is None


def test_stripes_are_vertical_and_then_horizontal():
    attention = small("cswin").stages[0].blocks[0].attn
    grid = TokenGrid(6, 9)
    assert [attention.stripe_of(branch, grid).shape for branch in (0, 1)] == [(6, 1), (1, 9)]


def test_four_neighbours_are_merged_down_the_first_column_and_then_the_second():
    merging = PatchMerging(1)
    merging.norm = merging.reduction = nn.Identity()
    fours = merging(torch.tensor([[0.0, 1.0, 4.0], [2.0, 3.0, 5.0]]).view(1, 1, 2, 3))
    assert fours[0, :, 0, 0].tolist() == [0, 2, 1, 3] and fours[0, :, 0, 1].tolist() == [4, 5, 0, 0]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("grid", [TokenGrid(8, 12), TokenGrid(4, 8), TokenGrid(8, 4)], ids=str)
def test_windows_are_attention_on_the_whole_grid_with_all_pairs_of_two_windows_forbidden(grid, shifted):
    window = WindowAttention(12, 2, ATTENTION["softmax"], grid=grid, window_size=4, shifted=shifted)
    whole = SelfAttention(12, 2, ATTENTION["softmax"], grid=grid)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    window.load_state_dict(whole.state_dict())
    # windows begin half a window later along the axes that hold several, and what is left at the borders is apart
    rows, columns = ((torch.arange(side) - (2 if shifted and side > 4 else 0)).div(4).floor() for side in grid.shape)
    number = (10 * rows[:, None] + columns).flatten()
    x = torch.randn(2, grid.num_places, 12)
    expected = whole(x, grid=grid, mask=number[:, None] != number)
    torch.testing.assert_close(window(x, grid=grid), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", [TokenGrid(8, 12), TokenGrid(4, 4), TokenGrid(3, 6), TokenGrid(2, 2)], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_fixed_windows_are_whole_ones_on_a_grid_that_is_filled_up_to_them_and_always_shift(grid, shifted):
    window = WindowAttention(12, 2, ATTENTION["softmax"], grid=grid, window_size=4, shifted=shifted, fixed=True)
    for parameter in window.parameters():
        nn.init.normal_(parameter)
    full = TokenGrid(*(-(-side // 4) * 4 for side in grid.shape))
    whole = SelfAttention(12, 2, ATTENTION["softmax"], grid=full)
    whole.load_state_dict(window.state_dict())
    # begun half a window later along both axes, what is left at the borders is apart
    rows, columns = ((torch.arange(side) - (2 if shifted else 0)).div(4).floor() for side in full.shape)
    number = (10 * rows[:, None] + columns).flatten()
    x = torch.randn(2, grid.num_places, 12)
    # what is filled in takes part
    image = nn.functional.pad(grid.to_image(x), (0, full.width - grid.width, 0, full.height - grid.height))
    expected = full.to_image(whole(image.flatten(2).mT, grid=full, mask=number[:, None] != number))
    found = grid.to_image(window(x, grid=grid))
    torch.testing.assert_close(found, expected[..., : grid.height, : grid.width], rtol=1e-4, atol=1e-4)


def test_a_pvt_drops_what_fills_no_patch_if_it_is_told_to():
    settings = {"embed_dims": (8, 8, 8, 8), "num_heads": (1, 1, 1, 1), "depths": (1, 1, 1, 1), "num_classes": 0}
    filling = subquad.create_model("pvt_tiny", attention="linear", **settings).eval()
    dropping = subquad.create_model("pvt_tiny", attention="linear", drop_remainder=True, **settings).eval()
    dropping.load_state_dict(filling.state_dict())
    x = torch.randn(1, 3, 70, 103)
    with torch.no_grad():
        maps = dropping.forward_intermediates(x, intermediates_only=True)
        # 70 and 103 px are 17 and 25 patches, then 8 and 12, 4 and 6, 2 and 3
        assert [tuple(m.shape[-2:]) for m in maps] == [(17, 25), (8, 12), (4, 6), (2, 3)]
        assert torch.equal(maps[0], dropping.forward_intermediates(x[..., :68, :100], intermediates_only=True)[0])
        whole = [
            network.forward_intermediates(x[..., :64, :96], intermediates_only=True) for network in (filling, dropping)
        ]
    assert all(map(torch.equal, *whole))
    with pytest.raises(subquad.SubquadError, match="a map of 4×1 holds no patch of 2×2"):
        dropping(x[..., :20])


@pytest.mark.parametrize("grid", [TokenGrid(6, 9), TokenGrid(9, 6), TokenGrid(5, 5)], ids=str)
def test_what_fills_up_the_last_stripe_is_not_attended_to(grid):
    attention = CrossShapedAttention(8, 2, ATTENTION["softmax"], grid=grid, split_size=4)
    with torch.no_grad():
        # all values are 1 and nothing else is added
        attention.qkv.weight[16:], attention.qkv.bias[16:] = 0, 1
        nn.init.zeros_(attention.lepe.weight), nn.init.zeros_(attention.lepe.bias)
        nn.init.eye_(attention.proj.weight), nn.init.zeros_(attention.proj.bias)
        x = torch.randn(2, grid.num_places, 8)
        torch.testing.assert_close(attention(x, x, grid=grid), torch.ones_like(x))


def test_mechanisms_that_ask_for_tokens_get_them_as_they_were_before_the_norm():
    grid, seen = TokenGrid(4, 4), {}
    block = CrossShapedBlock(8, CrossShapedAttention(8, 2, ATTENTION["inline"], grid=grid))
    block.attn.branches[0].register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True)
    x = 3 + torch.randn(2, 16, 8)
    block(x, grid=grid)
    assert torch.equal(seen["x"], x)


def test_settings_are_read_as_what_they_look_like_and_the_nearest_ones_win():
    assert parse_attention("x:a=3,b=0.5,c=true,d=False,e=relu") == (
        "x",
        {"a": 3, "b": 0.5, "c": True, "d": False, "e": "relu"},
    )
    assert type(parse_attention("x:a=3")[1]["a"]) is int
    pvt = {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 1, 1), "img_size": 64}

    def agents(attention, **settings):
        model = subquad.create_model("pvt_tiny", attention=attention, **pvt, **settings)
        return [stage.blocks[0].attn.inner.agent_grid.num_places for stage in model.stages]

    assert agents("agent") == [9, 16, 49, 49]
    assert agents("agent", num_agents=4) == [4] * 4
    assert agents("agent:num_agents=25", num_agents=4) == [25] * 4
    assert subquad.create_model("agent_deit_small_448", device="meta").img_size == (448, 448)
    # a network's own numbers stand above those of its size
    assert subquad.create_model("inline_deit_tiny", device="meta").blocks[0].attn.num_heads == 6


@pytest.mark.parametrize(
    ("text", "written_out"),
    [
        ("agent+agent+softmax", ["agent", "agent", "softmax"]),
        ("agent:num_agents=4 + linear:local=true+pola", ["agent:num_agents=4", "linear:local=true", "pola"]),
        ("focused:power=1e+0", "focused:power=1.0"),
        (["agent+agent+softmax"], [["agent", "agent", "softmax"]]),
    ],
)
def test_mechanisms_are_written_alike_in_python_in_recipes_and_on_the_command_line(text, written_out):
    built = subquad.create_model("deit_micro", attention=text, device="meta")
    expected = subquad.create_model("deit_micro", attention=written_out, device="meta")
    assert str(built) == str(expected)
    sequences = {"vocab_size": 9, "max_length": 12, "num_classes": 3, "embed_dim": 8, "depth": 3}
    with torch.device("meta"):
        assert str(create_sequence_model(text, **sequences)) == str(create_sequence_model(written_out, **sequences))


def test_padding_of_a_sequence_is_neither_attended_nor_counted():
    model = create_sequence_model("softmax", vocab_size=9, max_length=12, num_classes=3, embed_dim=8).eval()
    tokens = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 1]])
    whole, alone = model(tokens), model(tokens[:1, :3])
    torch.testing.assert_close(whole[:1], alone)


def test_scores_between_stages_leave_prefix_tokens_alone():
    residual = AttentionResidual(2, 3, prefix=1, scale=1.0)
    found = residual(torch.rand(1, 2, 16, 16), TokenGrid(4, 4))
    assert (
        found.shape == (1, 3, 5, 5)
        and not found[..., 0].any()
        and not found[..., 0, :].any()
        and found[..., 1:, 1:].any()
    )


def test_the_centred_loss_does_not_know_the_scale_of_scores():
    scores = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(diagonality_loss(scores), diagonality_loss(7 * scores + 2))


def test_counters_that_a_file_has_are_kept():
    model, other = small("softnet"), small("softnet")
    counters = [name for name in model.state_dict() if name.endswith("num_batches_tracked")]
    other.load_state_dict({name: t + 7 if name in counters else t for name, t in other.state_dict().items()})
    model.load_state_dict(other.state_dict())
    assert counters and {int(model.state_dict()[name]) for name in counters} == {7}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_are_read_without_what_wrappers_put_in_front(prefix, tmp_path):
    model = small("vit")
    torch.save({f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth")[0].keys() == model.state_dict().keys()


@pytest.mark.parametrize("attribute", ["model", "net", "network", "backbone"])
def test_what_a_trainer_saves_of_a_module_that_holds_the_network_is_read(attribute, tmp_path):
    model, other = small("vit"), small("vit")
    state = {f"{attribute}.{name}": tensor + 1 for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state | {"criterion.weight": torch.ones(3)}, "epoch": 1}, tmp_path / "last.ckpt")
    done = subquad.load_checkpoint(other, tmp_path / "last.ckpt")
    assert done.unused == ["criterion.weight"] and not done.new
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor + 1, rtol=0, atol=0)


def test_of_several_networks_in_a_trainers_module_none_is_chosen():
    model = small("vit")
    state = {f"{place}.{name}": tensor for place in ("model", "net") for name, tensor in model.state_dict().items()}
    with pytest.raises(subquad.SubquadError, match=r"does not fit this model: .* unexpected"):
        subquad.load_checkpoint(model, state)


def test_how_networks_are_evaluated_is_as_published():
    assert (default_cfg("agent_swin_base_384")["crop_pct"], default_cfg("agent_swin_tiny")["crop_pct"]) == (1.0, 0.875)
    assert default_cfg("soft_tiny")["crop_mode"] == "center" and default_cfg("soft_tiny")["crop_pct"] == 0.9
    assert default_cfg("agent_pvt_tiny")["crop_mode"] == "squash"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_networks_are_of_floating_point_numbers(dtype):
    with pytest.raises(subquad.SubquadError, match=f"dtype must be one of floating-point numbers, .* got {dtype}"):
        subquad.create_model("deit_micro", dtype=dtype)


def test_weights_whose_one_stage_was_written_as_several_still_open(tmp_path):
    model = subquad.create_model("deit_tiny", img_size=32, embed_dim=24, depth=3, num_heads=2, num_classes=3)
    model.creation["depths"] = [1, 2]
    subquad.save_weights(model, tmp_path / "model.safetensors")
    restored, _ = subquad.restore_model(tmp_path / "model.safetensors")
    assert restored.creation["depths"] == [3]
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(restored.eval()(images), model.eval()(images))


def test_weights_of_another_network_are_not_sent_to_another_image_size():
    # a table of 16 places and a class token, where the model's has none: "stands on no square" was all that was said
    state = subquad.create_model("deit_tiny", attention="softmax", img_size=64, depth=1).state_dict()
    model = subquad.create_model("pvt_tiny", attention="agent", img_size=64)
    with pytest.raises(subquad.SubquadError, match=r"does not fit this model: .* missing .* of another shape"):
        subquad.load_checkpoint(model, state)
