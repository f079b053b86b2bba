"""What the commands as functions can't be asked for is one line, as on the command line."""

import pytest

import subquad
from subquad.errors import SubquadError, UnknownSettingError


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "a.safetensors"
    model = subquad.create_model("deit_micro", depth=1, num_classes=2)
    subquad.save_weights(model, path, {"task": "classify", "classes": ["a", "b"], "input": {}})
    return path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: subquad.evaluate(path, batchsize=4), "unknown setting of evaluate 'batchsize': .* batch_size"),
        (lambda path: subquad.evaluate(path, output="a.json"), "unknown setting of evaluate 'output'"),
        (lambda path: subquad.predict(path, [path], topk=1), "unknown setting of predict 'topk': did you mean top_k"),
        (lambda path: subquad.analyze(path, measure=["entropy"]), "unknown setting of analyze 'measure': .* measures"),
        (lambda path: subquad.bench(["linear"], [16], dims=8), "setting of bench for mechanisms 'dims': .* dim"),
        (lambda path: subquad.bench(["deit_micro"], [8], dim=8), "unknown setting of bench for networks 'dim'"),
        (lambda path: subquad.tune(["linear"], [16], batch=1), "unknown setting of tune 'batch': .* batch_size"),
    ],
)
def test_settings_that_there_are_not_are_named(call, message, weights):
    with pytest.raises(UnknownSettingError, match=message):
        call(weights)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: subquad.analyze(path, batch_size=0), "batch_size must be a whole number of at least 1, got 0"),
        (lambda path: subquad.analyze(path, shown=-1), "shown must be a whole number of at least 0, got -1"),
        (lambda path: subquad.analyze(path, images=3), "images must be .* a list of paths or texts.*, got 3"),
        (lambda path: subquad.analyze(path, images="photos"), "no image or folder photos"),
        (lambda path: subquad.bench(["linear"], 16), "sizes are a list of whole numbers .*, got 16"),
        (lambda path: subquad.bench(["linear"], []), r"sizes are .* one at least, got \[\]"),
        (lambda path: subquad.bench([], [16]), "nothing to time"),
    ],
)
def test_values_that_a_flag_would_not_take_are_one_line(call, message, weights):
    with pytest.raises(SubquadError, match=message) as raised:
        call(weights)
    assert "\n" not in str(raised.value)


def test_one_name_is_timed_as_a_list_of_it():
    (row,) = subquad.bench("linear", [16], dim=8, num_heads=2, repeats=1)
    assert (row.mechanism, row.tokens) == ("linear", 16)
