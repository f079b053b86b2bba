"""Every size of the newer mechanisms' networks, against the released ones written out: entries, and what comes of them.

Reference numbers are of one size each (test_goldens.py); `written_out` reproduces those, and stands for the others.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import written_out
from made_weights import make_input, make_state_dict
from released import our_network
from written_out import KEPT

import subquad
from subquad.models.checkpoint_conversion import recognise
from subquad.models.networks import PUBLISHED
from subquad.weights.files import fitted
from subquad.weights.fitting import adapt, misfits


@dataclass(frozen=True)
class Size:
    """A released network: sizes of its layout, parameters, stochastic depth of the last block, γ at the start."""

    layout: dict
    params: int
    drop_path: float | None = None
    gammas: tuple[float, ...] = ()


def of(widths, depths, heads, **more):
    return {"widths": widths, "depths": depths, "heads": heads, **more}


def of_plain(width, heads):
    return {"width": width, "depth": 12, "heads": heads}


XT = of((32, 64, 128, 384), (2, 2, 2, 2), (1, 2, 4, 12))
B1 = of((32, 64, 192, 384), (2, 2, 4, 2), (1, 2, 6, 12))
T = of((64, 128, 256, 512), (2, 2, 6, 2), (1, 2, 4, 8))
S = of((64, 128, 320, 512), (3, 5, 9, 3), (1, 2, 5, 8))
B = of((96, 192, 384, 512), (4, 6, 12, 6), (1, 2, 6, 8))
L = of((96, 192, 448, 640), (4, 7, 19, 8), (1, 2, 7, 10))
ONES, HALVES, TINY = (1,) * 4, (1, 1, 1e-6, 1e-6), (1e-6,) * 4
H = ((64, 128, 320, 512), (2, 4, 10, 16))

SIZES = {
    "mala_t": Size(T | {"head_width": 2048}, 16_449_128, 0.1, ONES),
    "mala_s": Size(S | {"head_width": 2048}, 27_142_568, 0.15, ONES),
    "mala_b": Size(B | {"head_width": 2048}, 49_792_648, 0.4, HALVES),
    "mala_l": Size(L | {"head_width": 2560}, 97_766_088, 0.55, TINY),
    "rala_t": Size(T | {"head_width": 1024}, 14_897_768, 0.1, ONES),
    "rala_s": Size(S | {"head_width": 1024}, 25_591_208, 0.15, ONES),
    "rala_b": Size(B | {"head_width": 1024}, 48_241_288, 0.4, HALVES),
    "rala_l": Size(L | {"head_width": 1024}, 95_242_440, 0.55, TINY),
    "nala_xt": Size(XT | {"head_width": 1024}, 6_142_248, 0.1, ONES),
    "nala_t": Size(T | {"head_width": 1024, "ratio": 4}, 15_907_752, 0.1, ONES),
    "nala_s": Size(S | {"head_width": 1024}, 25_654_184, 0.15, ONES),
    "nala_b": Size(B | {"head_width": 1024, "ratio": 4}, 52_002_952, 0.4, HALVES),
    "nala_l": Size(L | {"head_width": 1024}, 95_426_760, 0.55, TINY),
    "polapp_b0": Size(XT | {"head_width": 2048}, 7_548_712, 0.1, ONES),
    "polapp_b1": Size(B1 | {"head_width": 2048}, 9_227_496, 0.1, ONES),
    "polapp_b2": Size(T | {"head_width": 2048}, 16_450_664, 0.1, ONES),
    "polapp_b3": Size(S | {"head_width": 2048}, 27_145_896, 0.15, ONES),
    "polapp_b4": Size(B | {"head_width": 2048}, 49_798_792, 0.4, HALVES),
    "polapp_b5": Size(L | {"head_width": 2560}, 97_773_000, 0.55, TINY),
    "mlla_t": Size(of((64, 128, 256, 512), (2, 4, 8, 4), (2, 4, 8, 16)), 24_392_200, 0.2),
    "mlla_s": Size(of((64, 128, 256, 512), (3, 6, 21, 6), (2, 4, 8, 16)), 43_015_048, 0.3),
    "mlla_b": Size(of((96, 192, 384, 768), (3, 6, 21, 6), (3, 6, 12, 24)), 95_983_960, 0.5),
    "ttt_vit_t": Size(of_plain(192, 6), 6_149_416, 0.0),
    "ttt_vit_s": Size(of_plain(384, 6), 23_799_400, 0.1),
    "ttt_vit_b": Size(of_plain(768, 12), 90_055_912, 0.4),
    "ttt_h_t": Size(of(H[0], (1, 3, 9, 4), H[1]), 28_703_560, 0.2),
    "ttt_h_s": Size(of(H[0], (2, 6, 18, 8), H[1]), 54_362_056, 0.4),
    "ttt_h_b": Size(of((96, 192, 448, 640), (2, 6, 18, 8), (3, 6, 14, 20)), 94_369_304, 0.6),
    "circulant_deit_t": Size(of_plain(192, 3), 6_140_200, 0.0),
    "circulant_deit_s": Size(of_plain(384, 6), 23_780_968, 0.1),
    "circulant_deit_b": Size(of_plain(768, 12), 93_567_208, 0.4),
    "mhla_deit_t": Size(of_plain(192, 3), 5_793_832),
    "mhla_deit_s": Size(of_plain(384, 6), 22_200_424, 0.1),
    "mhla_deit_b": Size(of_plain(768, 12), 86_864_104),
}
"""By the released configurations' names."""

FAST = ("polapp_b1", "mhla_deit_t", "circulant_deit_t")
FAST_AND_SLOW = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SIZES]


def num_stages(name):
    return len(SIZES[name].layout.get("depths", [1]))


def layout_of(name, blocks=None):
    """What a file of it holds; with so many `blocks` of each stage instead of its own."""
    kind, sizes = name.partition("_")[0], dict(SIZES[name].layout)
    if blocks is not None:
        sizes |= {"depth": blocks} if "depth" in sizes else {"depths": (blocks,) * num_stages(name)}
    if kind in ("mala", "rala", "nala", "polapp"):
        return written_out.mavit_layout(kind, **sizes)
    if kind == "mlla":
        return written_out.mlla_layout(**sizes)
    if name.startswith("ttt_h_"):
        return written_out.hvit3_layout(**sizes)
    return written_out.plain_layout(kind, **sizes, side=16 if kind == "mhla" else 14)


def made(layout):
    """Made-up weights, and what a network computes for itself: nothing that is read, but for MHLA's start."""
    entries = {
        name: {"shape": shape, "kind": "kept" if KEPT.search(name) else "made"} for name, shape in layout.items()
    }
    kept = {name: torch.zeros(shape) for name, shape in layout.items() if KEPT.search(name)}
    start = written_out.block_start((4, 4))[..., None, None]
    kept = {name: start if "piece_attn" in name else zeros for name, zeros in kept.items()}
    return make_state_dict(entries) | kept


def written(name, state, image):
    kind, heads = name.partition("_")[0], SIZES[name].layout["heads"]
    if kind in ("mala", "rala", "nala", "polapp"):
        return written_out.mavit(kind, state, image, heads)
    if kind == "mlla":
        return written_out.mlla(state, image, heads)
    if name.startswith("ttt_h_"):
        return written_out.hvit3(state, image, heads)
    return written_out.plain(kind, state, image, heads)


def test_every_published_network_of_these_mechanisms_is_among_the_sizes():
    mechanisms = {name.partition("_")[0] for name in SIZES}
    assert {our_network(name) for name in SIZES} == {name for name in PUBLISHED if name.partition("_")[0] in mechanisms}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_entries_of_every_size_are_read(name):
    layout, size = layout_of(name), SIZES[name]
    assert written_out.num_params(layout) == size.params
    golden = Path(__file__).parent / f"{name}.json"
    if golden.exists():
        record = json.loads(golden.read_text())["state_dict"]
        assert {key: tuple(entry["shape"]) for key, entry in record.items()} == layout
        assert {key for key, entry in record.items() if entry["kind"] == "kept"} == set(filter(KEPT.search, layout))
    model = subquad.create_model(our_network(name), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == size.params
    state = {key: torch.empty(shape, device="meta") for key, shape in layout.items()}
    adapted = fitted(state, model, name)
    assert not adapted.resized and not misfits(adapted.state, model.state_dict())
    assert recognise(state, name) == our_network(name)
    # what a network computes for itself may be absent, but for matrices that learn
    made_alone = adapt({key: tensor for key, tensor in state.items() if not KEPT.search(key)}, model)
    made_alone.keep_what_fits(model.state_dict(), model)
    assert made_alone.family == adapted.family and not made_alone.unused
    assert {key.rpartition(".")[2] for key in made_alone.new} <= {"mixing"}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_every_size_starts_as_released(name):
    size = SIZES[name]
    model = subquad.create_model(our_network(name), depths=(2,) * num_stages(name))
    last = [stage.blocks[-1] for stage in model.stages]
    assert [block.ls1.gamma.unique().item() for block in last if size.gammas] == pytest.approx(size.gammas, rel=1e-6)
    if size.drop_path is not None:
        assert getattr(last[-1].drop_path, "drop_prob", 0) == pytest.approx(size.drop_path)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", FAST_AND_SLOW)
def test_every_size_computes_what_the_written_out_network_does(name):
    """Two blocks of each stage, of all their widths and heads: how many there are shows in the entries."""
    state = made(layout_of(name, blocks=2))
    # maps that are not square, and of odd sides; the table of positions that MHLA has is for its own
    height, width = (
        (224, 224) if name.startswith("mhla") else (90, 150) if "depths" in SIZES[name].layout else (96, 160)
    )
    image = make_input((2, 3, height, width))
    model = subquad.create_model(our_network(name), depths=(2,) * num_stages(name)).double().eval()
    subquad.load_checkpoint(model, state)
    with torch.no_grad():
        expected = written(name, state, image)
        found = model(image)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * expected.std().item())
        single = model.float()(image.float()).double()
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4 * expected.std().item())
