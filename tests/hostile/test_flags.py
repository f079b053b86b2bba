"""Settings that train nonsense: refused in one line that names them, from Python, YAML and the command line alike.

What is tried follows from what recipes, constructors and commands declare.
"""

import argparse
import functools
import inspect
import math
import os
import typing

import pytest
import torch
import yaml

from subquad import ATTENTION, SubquadError, TokenGrid
from subquad.cli import main, make_parser
from subquad.cli.parser import FREE_TEXTS, run_name
from subquad.cli.streaming_command import map_to_write
from subquad.flags import Number, file_to_write, folder_to_write, pixels, to_read
from subquad.models import HOSTS, create_model
from subquad.models.pyramid import Pyramid
from subquad.pages.page_parts import check_page
from subquad.pages.standalone_charts import check_picture as check_chart
from subquad.ranges import Range, fits
from subquad.tasks import TASKS, Trained, fields_of, load_recipe, recipe_names
from subquad.tasks.detection.detectors import build_detector
from subquad.tasks.figures import check_picture
from subquad.tasks.segmentation.segmenters import Segmenter
from subquad.tasks.sequences.sequence_network import SequenceClassifier, create_sequence_model

NAN, INF = math.nan, math.inf
NUMBERS = (NAN, INF, -INF, -1, 0, 1, 0.5, 10**30, 1e300, 10**5000)
OTHERS = ("", "much", "1,2,3,4,5,6,7", "\x1b[2J", [], [[1]], {"a": 1}, None, True)
KINDS = [task.recipe_class for task in TASKS.values()]
FIELDS = {(field.name, field.declared): (kind, field) for kind in KINDS for field in fields_of(kind).values()}
FUNCTIONS = {
    **{f"attention {name}": cls.__init__ for name, cls in ATTENTION.items()},
    **{f"host {name}": cls.__init__ for name, cls in HOSTS.items()},
    **{made.__qualname__: made.__init__ for made in (Segmenter, Pyramid, SequenceClassifier)},
    **{made.__name__: made for made in (create_model, create_sequence_model, build_detector)},
}


def refusal(make):
    """What `make` complains of, in one line; None where it does not."""
    try:
        make()
    except SubquadError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return str(error)
    return None


def is_legal(field, value):
    """Whether a field's declaration allows a value, told apart from how the code does it."""
    if value is None:
        return field.is_optional
    if field.number is None:
        return None
    parts = typing.get_args(field.inner)
    count = None if parts[-1:] == (...,) else max(len(parts), 1)
    values = value if isinstance(value, list) and parts else [value]
    values = [part for value in values for part in (str(value).split(",") if isinstance(value, str) else [value])]
    if not values or (count is not None and len(values) not in (1, count)) or (len(values) > 1 and not parts):
        return False
    return all(_is_legal_number(field, value) for value in values)


def _is_legal_number(field, value):
    if isinstance(value, str):
        try:
            value = field.number(value)
        except ValueError:
            return False
    if isinstance(value, (list, dict, bool)) or value != value or value in (INF, -INF):
        return False
    if field.number is int and (int(value) != value or abs(value) > 2**63 - 1):
        return False
    rule = field.declared.range
    low = -INF if rule.at_least is None else rule.at_least
    high = INF if rule.at_most is None else rule.at_most
    # a whole number of thousands of digits is no float
    allowed = low <= value <= high and (rule.above is None or value > rule.above)
    return allowed and (rule.below is None or value < rule.below) and (field.number is int or value <= 1e38)


@functools.cache
def parser():
    return make_parser()


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_declares_its_range_and_every_text_its_choices_or_why_it_has_none(kind):
    for name, field in fields_of(kind).items():
        if field.number is not None:
            assert field.declared.range is not None, name
        elif field.inner is str:
            assert bool(field.declared.choices) != bool(field.declared.free), name
        assert not field.declared.rising or typing.get_origin(field.inner) is tuple, name


@pytest.mark.parametrize("kind", KINDS)
def test_packaged_recipes_and_defaults_are_what_is_declared(kind):
    for recipe in (kind(), *(load_recipe(name, kind) for name in recipe_names(kind))):
        for field in fields_of(kind).values():
            value = getattr(recipe, field.name)
            assert is_legal(field, list(value) if isinstance(value, tuple) else value) in (True, None), field.name


@pytest.mark.parametrize(
    ("kind", "field"), FIELDS.values(), ids=[f"{kind.task}-{f.name}" for kind, f in FIELDS.values()]
)
def test_a_field_takes_what_it_declares_and_nothing_else_wherever_it_comes_from(kind, field, tmp_path):
    file = tmp_path / "recipe.yaml"
    for value in (*NUMBERS, *OTHERS):
        said = refusal(lambda value=value: kind(**{field.name: value}))
        assert refusal(lambda value=value: kind().replace(**{field.name: value})) == said
        if value != 10**5000:
            file.write_text(yaml.safe_dump({field.name: value}))
            in_file = refusal(lambda: load_recipe(file, kind))
            assert (in_file or "").removeprefix(f"{file}: ") == (said or ""), value
        legal = is_legal(field, value)
        if legal is False:
            assert said is not None and said.startswith(field.name), value
        elif legal:
            # other fields may have something against it
            assert said is None or not said.startswith(f"{field.name} must be"), (value, said)
        elif field.inner in (str, bool) and not isinstance(value, (str, bool)):
            assert said is not None and field.name in said, value


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_plain_finite_and_named(kind):
    for value in ({"a": NAN}, {"a": [1, INF]}, {1: 2}, {"a": {"b": 1}}, [("a", 1)], "a", "=1", "a=[", "a=1,a=2", 3):
        said = refusal(lambda value=value: kind(settings=value))
        assert said is not None and ("settings" in said or "a in" in said), value


@pytest.mark.parametrize("kind", KINDS)
def test_what_means_nothing_to_a_task_is_no_field_of_it_and_is_read_as_earlier_versions_wrote_it(kind, tmp_path):
    file = tmp_path / "recipe.yaml"
    for name, value in kind.retired.items():
        assert name not in fields_of(kind)
        file.write_text(yaml.safe_dump({name: value}))
        assert load_recipe(file, kind) == kind()
        file.write_text(yaml.safe_dump({name: 7}))
        assert f"{name} means nothing to {kind.task}" in refusal(lambda: load_recipe(file, kind))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number_of_a_constructor_has_a_range_and_is_refused_outside_of_it(name):
    function = FUNCTIONS[name]
    grid = TokenGrid(4, 4)
    usual = {"dim": 8, "num_heads": 2, "grid": grid, "kv_grid": grid} if name.startswith("attention") else {}
    for argument, kind in typing.get_type_hints(function, include_extras=True).items():
        if argument == "return":
            continue
        numbers = list(_numbers_in(kind))
        if argument != "mean":
            assert all(isinstance(rule, Range) for rule in numbers), f"{argument} has no range: see subquad.ranges"
        for value in (NAN, INF, -1, "much", 10**30) if numbers else ():
            given = [value] * 4 if "Sequence" in str(kind) else value
            if not fits(given, kind):
                owner = (None,) if "self" in inspect.signature(function).parameters else ()
                said = refusal(lambda: function(*owner, **{**usual, argument: given}))  # noqa: B023
                assert said is not None and said.startswith(f"{argument} must be"), value


def _numbers_in(kind):
    """The range of each number in an annotation, its type where it has none."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        yield from (rule for rule in parts[1:] if parts[0] in (int, float))
    elif kind in (int, float):
        yield kind
    else:
        for part in parts:
            yield from _numbers_in(part)


def commands(group=None, path=()):
    """Every command: its words and its parser."""
    for action in (group or parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from commands(command, (*path, name))
    if group is not None and "run" in group._defaults:
        yield path, group


def flags_of(command):
    return {flag for action in command._actions for flag in action.option_strings}


def wrong_texts(action, field, file):
    """What an argument must refuse when it is read."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return [None]
    if isinstance(action.type, Number) or (field is not None and field.number):
        rule = action.type.range if isinstance(action.type, Number) else field.declared.range
        kind = action.type.kind if isinstance(action.type, Number) else field.number
        ends = [rule.above, rule.below]
        ends += [end + step for end, step in ((rule.at_least, -1), (rule.at_most, 1)) if end is not None]
        texts = ["nan", *(str(end) for end in ends if end is not None)]
        # fields are tried with more above
        return [*texts, "inf", "much", *(["0.123"] if kind is int else [])] if field is None else texts
    if action.type is run_name:
        return ["", ".", "..", "a/b", "/a", "../a", "a\\b", "x" * 300, "a\nb"]
    if action.type in (folder_to_write, file_to_write, map_to_write):
        return ["", f"{file}/a", f"{file}/a/b", "x" * 300] + (
            [str(file.parent)] if action.type is not folder_to_write else []
        )
    if action.type is to_read:
        return [""]
    if action.type is pixels:
        return ["0", "-1", "2.5", "much", "4x", "x4", "4x0", "4x4x4", "4,4,4", ",", "4 x", "9" * 12]
    if action.type is not None or action.choices or (field is not None and field.declared.choices):
        return ["no such thing"]
    # what a script's variable is that is not set; recipes themselves say which fields may be empty
    return [] if action.default in (argparse.SUPPRESS, "") or action.dest in FREE_TEXTS else ["", " "]


ACTIONS = [
    pytest.param(path, action, id=" ".join((*path, action.dest)))
    for path, command in commands()
    for action in command._actions
    if action.dest not in ("help", "debug")
]


@pytest.mark.parametrize(("path", "action"), ACTIONS)
def test_every_argument_of_every_command_refuses_what_it_is_not_in_one_line(
    path, action, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("subquad.cli.make_parser", lambda argv: parser())
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    command = dict(commands())[path]
    kind = next((kind for kind in KINDS if path[0] == kind.task), KINDS[0])
    field = fields_of(kind).get(action.dest) if "--config" in flags_of(command) else None
    others = [other for other in command._actions if other.required and other is not action]
    for text in wrong_texts(action, field, file):
        name = action.option_strings[0] if action.option_strings else None
        own = [f"{name}=1"] if text is None else [f"{name}={text}"] if name else [text]
        if name is None and action.nargs == 0:
            continue
        flags = [
            w for o in others if o.option_strings for w in (o.option_strings[0], next(iter(o.choices or ["nowhere"])))
        ]
        words = [own[0] if other is action else "nowhere" for other in command._actions if not other.option_strings]
        # a value that begins with a dash is no flag
        assert main([*path, *flags, *(own if name else []), "--", *words] if words else [*path, *flags, *own]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("subquad: ") and said.err.count("\n") == 1 and not said.out, text
        assert any(word in said.err for word in (name or action.dest, action.metavar or "?", action.dest)), said.err
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"], text


def test_no_number_of_a_command_is_without_a_range():
    for path, command in commands():
        for action in command._actions:
            assert action.type not in (int, float), f"{path} {action.dest}: see subquad.cli.parser.Number"
            assert action.type is None or callable(action.type)


def test_pixels_are_one_number_or_height_and_width():
    assert pixels("448") == 448 and pixels("384,640") == pixels("384x640") == pixels("384×640") == (384, 640)


@pytest.mark.parametrize("kind", [file_to_write, folder_to_write])
def test_a_folder_that_is_not_to_be_written_to_is_refused_in_front_of_the_work(kind, tmp_path, monkeypatch):
    assert kind(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    # whoever is root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not to be written to: .*b can't be written"):
        kind(str(tmp_path / "a" / "b"))
    if kind is folder_to_write:
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not to be written to: nothing can be written there$"):
            kind(str(tmp_path))


@pytest.mark.parametrize("check", [check_page, check_picture, check_chart], ids=["page", "picture", "chart"])
def test_where_nothing_can_be_written_it_is_said_in_front_of_the_work(check, tmp_path, monkeypatch):
    file = tmp_path / ("page.html" if check is check_page else "picture.png")
    check(file)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & os.W_OK)
    with pytest.raises(SubquadError, match=f"is not to be written to: .*{file.name} can't be written"):
        check(file)


@pytest.mark.parametrize("data", ["", " "])
def test_data_of_no_name_are_not_those_that_a_network_was_trained_on(data):
    trained = Trained("classify", torch.nn.Identity(), ("a", "b"), "digits", None, torch.device("cpu"))
    assert trained.data_to_judge() == "digits"
    with pytest.raises(SubquadError, match="data is empty"):
        trained.data_to_judge(data)


def test_numbers_that_are_too_large_are_told_up_to_what_they_go():
    """ "At least 0" is what they were."""
    with pytest.raises(argparse.ArgumentTypeError, match="at least 0 and at most 2147483647, got '4123456789'"):
        Number(int, at_least=0)("4123456789")
    assert Number(int, at_least=0, at_most=2**63 - 1)("4123456789") == 4123456789
    with pytest.raises(argparse.ArgumentTypeError, match="at least 0 and at most 8, got '4123456789'"):
        Number(int, at_least=0, at_most=8)("4123456789")
    with pytest.raises(
        SubquadError, match=r"num_classes must be .* at least 0 and at most 2147483647, got 1099511627776"
    ):
        create_model("deit_tiny", num_classes=2**40)
    with pytest.raises(SubquadError, match=r"num_classes must be .* at least 0, got -1"):
        create_model("deit_tiny", num_classes=-1)
    seeds = make_parser().parse_args(["diffuse", "--model", "a", "--prompt", "b", "--seed", "4123456789"]).seed
    assert seeds == [4123456789]
