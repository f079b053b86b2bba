"""The ceiling of networks that are not plain: attention's share of the products, counted stage by stage."""

import pytest
import timm
from foreign import FOREIGN
from foreign import teacher as foreign_teacher
from foreign_more import MORE, PYRAMIDS
from foreign_more import teacher as teacher_of_more

from subquad import ATTENTION
from subquad.conversion import advise, convert, converted_layers, find_tower
from subquad.conversion.advising import HandOn
from subquad.conversion.counted_products import Counted, count_mixing
from subquad.models import create_model


def counted(model, **chosen):
    tower = find_tower(model)
    without = convert(model, "linear", **chosen)
    layers = converted_layers(without)
    for layer in layers.values():
        layer.inner = HandOn()
    return count_mixing(model, without, tower, (64, 64))


def test_a_plain_block_is_as_the_formula_says():
    """Blocks of 17 tokens and 48 channels: 2n²c products between projections, 12nc² in the rest; and what is around."""
    share = counted(foreign_teacher("timm ViT")).share
    n, c = 17, 48
    blocks, embedding, head = 2 * (2 * n * n * c + 12 * n * c * c), 16 * c * 3 * 16 * 16, c * 5
    assert share == pytest.approx(2 * 2 * n * n * c / (blocks + embedding + head), rel=1e-6)


def test_windows_take_less_and_are_counted_by_stage():
    told = counted(foreign_teacher("timm Swin"))
    # maps of 16×16 and 8×8 in windows of 4×4, of 24 and 48 channels, in two blocks each
    mixing = [2 * 2 * side * side * 16 * c for side, c in ((16, 24), (8, 48))]
    assert told.stages[0] / told.stages[1] == pytest.approx(mixing[0] / mixing[1])
    assert 0 < told.share < 0.2
    assert told.ceiling == pytest.approx(1 / (1 - sum(told.stages)))


def test_only_blocks_that_would_be_converted_count():
    both, one = counted(foreign_teacher("timm Swin")), counted(foreign_teacher("timm Swin"), blocks=[0])
    assert one.stages == (pytest.approx(both.stages[0] / 2), 0)
    sam = foreign_teacher("timm SAM")
    whole, all_blocks = counted(sam), counted(sam, blocks=[0, 1, 2])
    assert 0 < whole.share < all_blocks.share


def test_advice_counts_where_the_network_is_not_plain():
    for name in ("timm SAM", "our PVTv2"):
        advice = advise(lambda px, name=name: foreign_teacher(name), [(64, 64)], ["linear"], repeats=1)
        assert advice.ceilings == {}
        assert "of all products" in advice.text
        assert all(len(line) <= 80 for line in advice.text.splitlines())
        assert 0 < advice.counted[64, 64].share < 1


def test_an_mlp_of_another_width_is_counted():
    def make(px):
        return timm.create_model("vit_tiny_patch16_224", img_size=px, embed_dim=48, depth=2, num_heads=4, mlp_ratio=2)

    advice = advise(make, [(512, 512)], ["linear"], repeats=1)
    assert advice.ceilings == {}
    n, c = 1025, 48
    # 4c² of projections and 4c² of the MLP; patches of 16 × 16 px, and a head
    rest = 2 * 8 * n * c * c + (n - 1) * 768 * c + 1000 * c
    assert advice.counted[512, 512].ceiling == pytest.approx(1 + 2 * 2 * n * n * c / rest, rel=1e-6)


# one's heads of its own can't be replaced
@pytest.mark.parametrize("attention", [name for name, cls in ATTENTION.items() if not cls.traits.extra_heads])
def test_a_network_that_forms_no_pairs_is_not_promised_what_pairs_cost(attention):
    def make(px):
        sizes = {"embed_dim": 48, "depths": (1,), "num_heads": 2, "class_token": False, "global_pool": "avg"}
        return create_model("deit_tiny", attention=attention, img_size=px, **sizes)

    advice = advise(make, [(512, 512)], ["linear"], repeats=1)
    n, c = 1024, 48
    if ATTENTION[attention].traits.quadratic:
        assert advice.ceilings == {(512, 512): 1 + n / (6 * c)} and not advice.counted
    else:
        assert advice.ceilings == {} and 1 <= advice.counted[512, 512].ceiling < 1 + n / (12 * c)


def test_text_of_stages():
    assert "75.0% are attention's" in Counted((0.5, 0.25)).text
    assert "at most 4.00 times as fast; of stages 50.0%, 25.0%" in Counted((0.5, 0.25)).text
    assert "stages" not in Counted((0.5,)).text


def test_text_where_a_student_would_take_more():
    # few keys of many places cost less than keys and values of all
    said = Counted((-0.25, 0.0)).text
    assert "converted layers would take 25.0% more" in said
    assert "at most 0.80 times as fast" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOREIGN, *MORE])
@pytest.mark.thinned(3)
def test_products_of_every_family_are_counted(name):
    model = foreign_teacher(name) if name in FOREIGN else teacher_of_more(name)
    side = 56 if "EVA" in name or name == "timm DINOv2 with registers" else 64
    if name in PYRAMIDS or any(kind in name for kind in ("MiT of", "Twins-SVT", "MobileNetV4")):
        # where a student has keys and values of all places, which cost more than softmax of few does
        side = 512
    if name == "transformers PVT":
        # it takes images of one size
        model = PYRAMIDS[name][0](image_size=side)
    without = convert(model, "linear", img_size=side)
    layers = converted_layers(without)
    for layer in layers.values():
        layer.inner = HandOn()
    tower = find_tower(model, img_size=(side, side))
    assert 0 < count_mixing(model, without, tower, (side, side)).share < 1
