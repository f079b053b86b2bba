"""What is measured of a conversion: time and memory at sizes, simple classifiers of features, maps of both networks."""

import json
from dataclasses import replace

import pytest
import torch
from foreign import FOREIGN, sharp, side_of
from mechanisms import WITH_WEIGHTS, WITHOUT_WEIGHTS, refuses
from PIL import Image

import subquad
from subquad import ATTENTION, SubquadError
from subquad.analysis import attention_weights
from subquad.attention import traits_of
from subquad.conversion import Judging, conversion_of
from subquad.conversion.conversion_record import REPORT, Record, read_record
from subquad.conversion.judging import Comparison, compare_networks
from subquad.conversion.labelled_features import (
    LabelledComparison,
    LabelledJudge,
    Readable,
    labelled_sets,
    pooled_features,
)
from subquad.conversion.measured_costs import check_sizes, measure_costs
from subquad.conversion.paired_maps import MOST_TOKENS, paired_maps
from subquad.data import InputConfig

CONFIG = InputConfig((64, 64))
PICTURES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_sizes_are_asked_before_anything_is_trained():
    assert Judging(sizes=(64, (64, 96))).sizes == (64, (64, 96))
    for size in (-3, "large", (64, 0), (64, 64, 64)):
        with pytest.raises(SubquadError, match="a size of sizes is pixels, one number or height and width, got"):
            Judging(sizes=(64, size))


@pytest.mark.parametrize("attention", WITHOUT_WEIGHTS)
def test_a_student_without_weights_is_not_shown_and_the_page_says_why(attention):
    teacher = sharp("timm ViT")
    maps = paired_maps(subquad.convert(teacher, attention), teacher, PICTURES, CONFIG)
    assert traits_of(ATTENTION[attention]).no_weights in maps.without
    assert all(maps.looks["teacher"]) and not any(maps.looks["student"])


@pytest.mark.parametrize("attention", sorted(WITH_WEIGHTS))
def test_maps_of_both_are_those_of_the_blocks(attention):
    """With softmax both are the same, with others they are the weights that the mechanism's probes give."""
    teacher = sharp("timm SigLIP" if refuses(attention, "prefix") else "timm ViT")
    student = subquad.convert(teacher, attention, **({"num_agents": 4} if attention == "agent" else {}))
    maps = paired_maps(student, teacher, PICTURES, CONFIG)
    assert maps.without == ""
    assert [picture.size for picture in maps.pictures] == [(64, 64)] * 2
    numbers = sorted(conversion_of(student).paths)
    for looks in maps.looks.values():
        assert [[look.layer for look in image] for image in looks] == [numbers] * 2
    assert {look.mechanism for look in maps.looks["teacher"][0]} == {"softmax"}
    assert {look.mechanism for look in maps.looks["student"][0]} == {attention}
    probed = attention_weights(teacher, PICTURES[:1])[-1]
    look = maps.looks["teacher"][0][-1]
    whole = probed.weights[0].mean((0, 1))[probed.grid.prefix :, probed.grid.prefix :]
    small = torch.from_numpy(look.weights[: len(whole)]).float() * look.scale
    torch.testing.assert_close(small, whole, atol=look.scale, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_students_of_every_family_show_their_maps(name):
    side = side_of(name)
    teacher = sharp(name)
    student = subquad.convert(teacher, "linear", img_size=side)
    maps = paired_maps(student, teacher, PICTURES[..., :side, :side], InputConfig((side, side)))
    assert all({look.layer for look in image} <= set(conversion_of(student).paths) for image in maps.looks["student"])
    assert all(maps.looks["student"])
    assert "student" not in maps.without
    assert "no softmax" not in maps.without


def test_a_teacher_that_is_no_softmax_is_not_shown_as_one():
    teacher = subquad.create_model("deit_micro", attention="linear", img_size=32).eval()
    maps = paired_maps(subquad.convert(teacher, "agent:num_agents=4"), teacher, PICTURES[..., :32, :32], CONFIG)
    assert set(maps.looks) == {"student"}
    assert "no softmax" in maps.without


def test_what_shows_no_weights_or_too_many_is_said(monkeypatch):
    teacher = sharp("timm ViT")
    student = subquad.convert(teacher, "linear")
    monkeypatch.delattr(type(student.blocks[1].attn.inner), "weights")
    maps = paired_maps(student, teacher, PICTURES, CONFIG)
    assert "The student shows no weights over a whole map in blocks 0, 1" in maps.without
    monkeypatch.setattr("subquad.conversion.paired_maps.MOST_TOKENS", 3)
    few = paired_maps(student, teacher, PICTURES, CONFIG)
    assert "at most of 3" in few.without
    assert few.looks == {}
    assert MOST_TOKENS > 3


def test_windows_have_no_map_of_the_image():
    teacher = sharp("timm Swin")
    maps = paired_maps(subquad.convert(teacher, "linear"), teacher, PICTURES, CONFIG)
    assert [[look.layer for look in image] for image in maps.looks["student"]] == [[0, 2, 3]] * 2
    assert "The teacher shows no weights over a whole map in blocks 0, 2, 3" in maps.without


def test_time_and_memory_are_measured_at_each_size():
    teacher = sharp("timm ViT")
    rows = measure_costs(subquad.convert(teacher, "linear"), teacher, [64, (32, 96)], repeats=1)
    assert [row.px for row in rows] == [64, (32, 96)] and [row.size for row in rows] == [(64, 64), (32, 96)]
    assert min(rows[0].teacher_ms, rows[0].student_ms, rows[0].teacher_mb, rows[0].student_mb) > 0
    with pytest.raises(SubquadError, match="does not run at 65×65"):
        check_sizes(teacher, [64, 65])
    with pytest.raises(SubquadError, match="does not run at 64×65"):
        check_sizes(teacher, [(64, 65)])
    with pytest.raises(SubquadError, match=r"does not run at 64×64 \(.*\): what is timed takes images alone"):
        measure_costs(torch.nn.Bilinear(4, 4, 4), torch.nn.Bilinear(4, 4, 4), [64], repeats=1)


def test_images_without_labels_are_pairs_too():
    teacher = sharp("timm ViT")
    with pytest.raises(SubquadError, match=r"batches are pairs .* \[\(images, None\)\]"):
        compare_networks(teacher, teacher, PICTURES)
    assert compare_networks(teacher, teacher, [(PICTURES, None)]).images == 2


def test_classifiers_of_the_same_features_find_the_same():
    sets = labelled_sets("digits", InputConfig((64, 64)), max_images=60)
    teacher = sharp("timm ViT")
    judge = LabelledJudge(sets, teacher)
    judge.note("swapped", subquad.convert(teacher, "softmax"))
    judge.note("other", subquad.convert(teacher, "linear"))
    told = judge.comparison
    assert (told.train, told.test) == (60, 60)
    assert told.steps["swapped"] == told.teacher != told.steps["other"]
    assert told.teacher.probe > 0.3
    assert told.teacher.agreement == 1
    # the labels are not its five classes
    assert told.teacher.head is None
    assert "nearest neighbours" in told.teacher.text
    own = LabelledJudge(sets, teacher, sets["train"].classes).comparison.teacher
    assert 0 <= own.head <= 0.4


@pytest.mark.parametrize(("held_out", "says"), [("cat", "has one class alone, 'cat'"), ("owl", "cat.*owl")])
def test_labelled_data_have_classes_to_be_told_apart_the_same_in_both_parts(held_out, says, tmp_path):
    for split, name in (("train", "cat"), ("val", held_out)):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / name / "0.png")
    with pytest.raises(SubquadError, match=says):
        labelled_sets(str(tmp_path), CONFIG)


def test_features_without_a_head_are_means_over_tokens_or_places():
    tokens = torch.randn(2, 5, 3)
    places = torch.randn(2, 3, 4, 4)
    assert torch.equal(pooled_features(lambda images: tokens, PICTURES)[0], tokens.mean(1))
    assert torch.equal(pooled_features(lambda images: places, PICTURES)[0], places.mean((2, 3)))


def test_a_record_of_a_version_that_judged_classifiers_alone_is_read(tmp_path):
    step, told = Comparison(4, 0.9, 0.1, 0.5, 0.25, 0.5), Readable(0.5, 0.75)
    record = Record({}, {"paths": {"3": "blocks.3"}}, {"swapped": step, "aligned": step}, {})
    record = replace(record, labelled=LabelledComparison("digits", 8, 4, told, {"aligned": told}))
    record.save(tmp_path)
    content = json.loads((tmp_path / REPORT).read_text())
    for kept in content["steps"].values():
        kept |= {"student_top1": kept.pop("student_score"), "teacher_top1": kept.pop("teacher_score")}
        del kept["measure"]
    content["labelled"]["student"] = content["labelled"].pop("steps")["aligned"]
    (tmp_path / REPORT).write_text(json.dumps(content))
    assert read_record(tmp_path) == record


def test_a_record_is_read_as_it_was_written(tmp_path):
    step = Comparison(4, 0.9, 0.1, 0.5, 0.25, 0.5)
    record = Record({"attention": "agent"}, {"paths": {"3": "blocks.3"}}, {"swapped": step}, {}, before={3: 0.5})
    record.save(tmp_path)
    assert read_record(tmp_path) == record
    assert record.converted == (3,)
    content = json.loads((tmp_path / REPORT).read_text())
    assert content["steps"]["swapped"]["kept"] == 0.5
    del content["steps"]["swapped"]["error"]
    (tmp_path / REPORT).write_text(json.dumps(content))
    with pytest.raises(SubquadError, match="is damaged"):
        read_record(tmp_path)
    with pytest.raises(SubquadError, match="holds no converted network"):
        read_record(tmp_path / "none")
