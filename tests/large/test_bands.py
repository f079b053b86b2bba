"""A network over several processes computes what it does in one: logits, losses, gradients, whatever the bands."""

import copy
import importlib
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts import CLASSES, small
from threads import together

import subquad
from subquad import ATTENTION
from subquad.attention import traits_of
from subquad.errors import SubquadError
from subquad.grid import BandGrid
from subquad.large.bands import band_rows, split_over

SPREADING = sorted(name for name in ATTENTION if traits_of(ATTENTION[name]).spreads)
SPREADING_HOSTS = sorted(kind for kind, host in CLASSES.items() if host.spreads)


def randomised(model):
    """All parameters random and away from zero, in float64, so that each of them counts."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().train()


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)


def alone(model, images, labels):
    logits = model(images)
    loss_of(logits, labels).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def in_bands(model, images, labels, heights):
    """The same by processes that hold bands of these heights, or of those that are as equal as may be."""
    copies = [copy.deepcopy(model) for _ in range(heights if isinstance(heights, int) else len(heights))]

    def one(index, exchange):
        mine = split_over(copies[index], exchange)
        if isinstance(heights, int):
            rows = band_rows(mine, images.shape[2])
            assert 0 <= rows.start < rows.stop <= images.shape[2]
        else:
            rows = slice(sum(heights[:index]), sum(heights[: index + 1]))
        logits = mine(images[:, :, rows])
        loss_of(logits, labels).backward()
        return logits.detach(), {name: p.grad for name, p in mine.named_parameters()}

    results = together(len(copies), one)
    for logits, _ in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=0)
    grads = {name: sum(grads[name] for _, grads in results) / len(results) for name in results[0][1]}
    return results[0][0], grads


def check_equal(model, images, heights):
    labels = torch.arange(len(images)) % model.num_classes
    logits, grads = alone(copy.deepcopy(model), images, labels)
    their_logits, their_grads = in_bands(model, images, labels, heights)
    torch.testing.assert_close(their_logits, logits, rtol=1e-9, atol=1e-10)
    assert grads.keys() == their_grads.keys()
    # a gradient of nearly zeros is as exact as what cancels in it
    largest = max(grad.abs().max().item() for grad in grads.values())
    for name, grad in grads.items():
        error = (their_grads[name] - grad).abs().max().item()
        assert error <= 1e-10 * max(grad.abs().max().item(), 1e-3 * largest), name


@pytest.mark.parametrize("attention", SPREADING)
def test_every_mechanism_that_spreads_computes_what_one_process_does(attention):
    model = randomised(small("vit", attention, depths=(2,), drop_path_rate=0))
    # five rows of patches in two bands, on a grid that is not that of the tables
    check_equal(model, torch.randn(2, 3, 40, 24, dtype=torch.float64), [24, 16])


@pytest.mark.parametrize("host", SPREADING_HOSTS)
@pytest.mark.parametrize("attention", ["linear", "agent"])
def test_every_host_that_spreads_computes_what_one_process_does(host, attention):
    model = randomised(small(host, attention, drop_path_rate=0))
    check_equal(model, torch.randn(2, 3, 109, 40, dtype=torch.float64), [32, 64, 13])


def traffic(attention, height, width):
    """What a band between others hands over in a forward and a backward pass of one block."""
    settings = {"img_size": (height, width), "depths": (1,), "class_token": False, "global_pool": "avg"}
    model = small("vit", attention, drop_path_rate=0, **settings).train()
    copies = [copy.deepcopy(model) for _ in range(3)]

    def one(index, exchange):
        mine = split_over(copies[index], exchange)
        image = torch.randn(1, 3, height, width)[:, :, band_rows(mine, height)]
        mine(image).sum().backward()
        return exchange

    return together(3, one)[0].counted


@pytest.mark.parametrize("attention", SPREADING)
def test_what_a_layer_sends_does_not_grow_with_tokens(attention):
    few, tall, wide = (traffic(attention, *size) for size in ((96, 32), (192, 32), (96, 64)))
    assert few.sums == tall.sums == wide.sums
    # less where there are fewer landmarks
    assert tall.sum_bytes <= few.sum_bytes and wide.sum_bytes <= few.sum_bytes
    # borders are rows: as long as the map is wide, however high it is
    assert (tall.borders, tall.border_bytes) == (few.borders, few.border_bytes)
    assert wide.borders == few.borders and wide.border_bytes == 2 * few.border_bytes


@pytest.mark.slow
def test_the_page_has_what_the_script_counts_of_each_mechanism(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "scripts")
    importlib.import_module("tokens_over_processes").bytes_sent()
    page = (root / "docs" / "tokens-over-processes.md").read_text()
    assert [row for row in capsys.readouterr().out.splitlines() if row not in page] == []


def test_linear_attention_sends_its_state_and_the_sum_of_its_keys():
    sent = traffic("linear", 96, 32)
    heads, channels = 2, 12
    state, of_keys, count = heads * channels**2, heads * channels, 1
    of_head = 2 * channels + 1
    # there and, as gradients, back; the head reads the mean token
    assert sent.sum_bytes == 2 * 4 * (state + of_keys + count + of_head)
    assert (sent.sums, sent.borders) == (4, 0)


@pytest.mark.parametrize("pool", ["avg", "max", "token"])
def test_heads_read_all_bands(pool):
    model = randomised(small("dinov2_reg4", "linear", global_pool=pool))
    check_equal(model, torch.randn(2, 3, 40, 24, dtype=torch.float64), 4)


@pytest.mark.parametrize("attention", SPREADING)
def test_mechanisms_turn_their_features_by_the_place_of_the_band(attention):
    model = randomised(small("dinov3", attention, drop_path_rate=0))
    check_equal(model, torch.randn(1, 3, 72, 40, dtype=torch.float64), 3)


def test_eight_processes_hold_a_row_each():
    model = randomised(small("vit", "agent", drop_path_rate=0))
    check_equal(model, torch.randn(1, 3, 61, 40, dtype=torch.float64), 8)


def test_keys_may_be_reduced():
    model = randomised(small("pvt", "linear", sr_ratio=(8, 4, 2, 1), drop_path_rate=0))
    check_equal(model, torch.randn(1, 3, 109, 40, dtype=torch.float64), [32, 64, 13])
    with pytest.raises(SubquadError, match="bands of 8 12 4 rows can't be made 8 times smaller"):
        BandGrid.cut((8, 12, 4), 1, 10).reduced(8)


def test_maps_of_all_levels_are_those_of_the_bands():
    model = randomised(small("pvt", "linear", drop_path_rate=0)).eval()
    image = torch.randn(1, 3, 109, 40, dtype=torch.float64)
    whole = model.forward_intermediates(image, intermediates_only=True)

    def one(index, exchange):
        mine = split_over(copy.deepcopy(model), exchange)
        return mine.forward_intermediates(image[:, :, band_rows(mine, 109)], intermediates_only=True)

    for level, maps in zip(whole, zip(*together(3, one), strict=True), strict=True):
        torch.testing.assert_close(torch.cat(maps, dim=2), level)


def test_a_batch_norm_remembers_what_one_process_would():
    model = randomised(small("mllanet", "linear", drop_path_rate=0))
    images = torch.randn(2, 3, 109, 40, dtype=torch.float64)
    copies = [copy.deepcopy(model) for _ in range(3)]
    together(
        3, lambda index, exchange: (mine := split_over(copies[index], exchange))(images[:, :, band_rows(mine, 109)])
    )
    model(images)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(dict(copies[1].named_buffers())[name], buffer, msg=name)


@pytest.mark.parametrize(
    ("host", "attention"),
    [*(("vit", attention) for attention in SPREADING), *((host, "linear") for host in SPREADING_HOSTS)],
)
def test_networks_of_bf16_are_spread_as_well(host, attention):
    model = small(host, attention, drop_path_rate=0).bfloat16().train()
    image = torch.randn(1, 3, 109, 40)

    def one(index, exchange):
        mine = split_over(copy.deepcopy(model), exchange)
        logits = mine(image.bfloat16()[:, :, band_rows(mine, 109)])
        logits.float().square().sum().backward()
        return logits, [p.grad is not None for p in mine.parameters()]

    logits, grads = together(2, one)[0]
    assert logits.dtype == torch.bfloat16 and all(grads)
    exact = copy.deepcopy(model).float()(image)
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max() + 1e-3


@pytest.mark.parametrize("pool", ["avg", "max", "token"])
def test_what_heads_read_has_the_dtype_of_tokens(pool):
    model = small("vit", "linear", global_pool=pool, drop_path_rate=0).bfloat16()
    image = torch.randn(1, 3, 40, 24).bfloat16()
    (logits,) = together(1, lambda index, exchange: split_over(copy.deepcopy(model), exchange)(image))
    assert logits.dtype == torch.bfloat16


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_compiled_they_compute_the_same():
    model = small("vit", "focused", drop_path_rate=0).eval()
    image = torch.randn(1, 3, 40, 24)

    def one(index, exchange):
        return torch.compile(split_over(copy.deepcopy(model), exchange), backend="eager")(image)

    with torch.no_grad():
        torch.testing.assert_close(together(1, one)[0], model(image))


@pytest.fixture
def alone_in_gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_who_is_no_group_of_processes_is_one_line(alone_in_gloo):
    model = small("vit", "linear")
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("images", "tokens"))
    for given, words in (
        (mesh, r"one axis of a mesh, and this one has 2: mesh\['tokens'\]"),
        (None, "an axis of a DeviceMesh, or a process group"),
        (2, "an axis of a DeviceMesh, or a process group"),
    ):
        with pytest.raises(SubquadError, match=words) as refusal:
            subquad.split_tokens(model, given)
        assert "\n" not in str(refusal.value)
    split = subquad.split_tokens(model, mesh["tokens"])
    for height in (0, -8, 64.0):
        with pytest.raises(SubquadError, match="height must be a whole number of at least 1"):
            band_rows(split, height)


def test_without_processes_that_have_met_it_is_one_line():
    with pytest.raises(SubquadError, match="init_process_group"):
        subquad.split_tokens(small("vit", "linear"), None)


@pytest.mark.parametrize("host", ["vit", "pvt"])
def test_what_a_network_of_bands_can_not_be_is_said_at_once(host):
    def one(index, exchange):
        split = split_over(small(host, "linear"), exchange)
        for words, call in (
            ("stream the network that it was", lambda: subquad.stream(split, torch.zeros(3, 64, 64))),
            ("take subquad.chunk_mlps", lambda: subquad.chunk_blocks(split)),
            ("frames", lambda: subquad.join_frames(split)),
            ("convert it first, and split it then", lambda: subquad.convert(split, "softmax")),
            ("take subquad.chunk_mlps", lambda: split_over(subquad.chunk_blocks(small(host, "linear")), exchange)),
        ):
            with pytest.raises(SubquadError, match=words) as refusal:
                call()
            assert "\n" not in str(refusal.value)

    together(1, one)


@pytest.mark.parametrize("attention", sorted(set(ATTENTION) - set(SPREADING)))
def test_mechanisms_that_can_not_be_spread_say_so(attention):
    with pytest.raises(SubquadError, match="can't be spread over processes") as raised:
        split_over(small("vit", attention), None)
    assert "\n" not in str(raised.value)


class Untold(torch.nn.Module):
    """A mechanism that says nothing of itself but its inputs, as it may."""

    inputs = ("q", "v", "padding")

    def __init__(self, dim, num_heads, *, grid, kv_grid):
        super().__init__()

    def forward(self, q, v, padding=None, *, grid, kv_grid):
        return v.mean(dim=2, keepdim=True).expand_as(q)

    def weights(self, q, padding=None, *, grid, kv_grid):
        return q.new_full((*q.shape[:2], 1, q.shape[2], q.shape[2]), 1 / q.shape[2])


def test_a_mechanism_without_traits_is_not_spread(monkeypatch):
    monkeypatch.setitem(ATTENTION, "untold", Untold)
    with pytest.raises(SubquadError, match="Untold attention can't be spread over processes"):
        split_over(small("vit", "untold"), None)


@pytest.mark.parametrize("host", sorted(set(CLASSES) - set(SPREADING_HOSTS)))
def test_hosts_that_can_not_be_spread_say_so(host):
    with pytest.raises(SubquadError, match="can't be spread over processes"):
        split_over(small(host, "linear"), None)


@pytest.mark.parametrize(
    ("heights", "width", "message"),
    [
        ([24, 12], [40, 40], None),
        ([20, 16], [40, 40], "multiples of 8"),
        ([24, 0], [40, 40], "every process has to hold some"),
        ([24, 16], [40, 48], "different images: 1×3×24×40, 1×3×16×48"),
        ([16, 8, 16], [40, 40, 40], "unless they have 16 rows"),
    ],
)
def test_bands_that_do_not_fit_are_refused_by_all(heights, width, message):
    model = small("vit", "pola", depths=(1,))

    def one(index, exchange):
        mine = split_over(copy.deepcopy(model), exchange)
        try:
            mine(torch.randn(1, 3, heights[index], width[index]))
        except SubquadError as error:
            return str(error)

    for told in together(len(heights), one):
        assert (told is None) if message is None else message in told


def test_a_network_in_bands_is_copied_but_not_pickled():
    model, image = small("vit", "linear", depths=(1,)).eval(), torch.randn(1, 3, 24, 24)

    def one(index, exchange):
        mine = split_over(copy.deepcopy(model), exchange)
        for save in (pickle.dumps, lambda network: torch.save(network, io.BytesIO())):
            with pytest.raises(SubquadError, match=r"can't be pickled, .* keep its state_dict\(\)"):
                save(mine)
        # the threads' own exchange can't be copied, as that of processes can
        again = copy.deepcopy(mine, {id(exchange): exchange})
        assert again.state_dict().keys() == model.state_dict().keys()
        return again(image)

    (logits,) = together(1, one)
    torch.testing.assert_close(logits, model(image))
