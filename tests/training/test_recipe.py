import dataclasses

import pytest

from subquad.errors import SubquadError
from subquad.models import NETWORKS, VARIANTS
from subquad.reading import parse_settings
from subquad.tasks import TASKS, fields_of, load_recipe, recipe_names
from subquad.tasks.classification import Recipe

KINDS = [task.recipe_class for task in TASKS.values()]
PACKAGED = [(kind, name) for kind in KINDS for name in recipe_names(kind)]


@pytest.mark.parametrize(("kind", "name"), PACKAGED)
def test_a_packaged_recipe_survives_being_written_and_read(kind, name, tmp_path):
    recipe = load_recipe(name, kind)
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml", kind) == recipe


@pytest.mark.parametrize(("kind", "name"), PACKAGED)
def test_a_packaged_recipe_names_its_source_and_its_command(kind, name):
    head = (kind.folder / f"{name}.yaml").read_text().splitlines()[:3]
    assert all(line.startswith("# ") for line in head[:2])
    assert f"--config {name}" in " ".join(head)


def test_the_recipes_of_the_papers_are_there():
    papers = {"deit", "pvt", "swin", "cswin", "soft", "mavit", "swin_384", "cswin_384"}
    assert papers | {"cifar10", "cifar10_small", "digits"} <= set(recipe_names(Recipe))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_network_is_trained_as_its_size_was(name):
    task, networks = TASKS["classify"], [each for each, row in NETWORKS.items() if row.variant == name]
    for model in (name, *networks):
        assert task.default_recipe({"data": "imagenet", "model": model}) == VARIANTS[name].recipe


def test_mavits_recipe_is_the_published_one():
    recipe = load_recipe("mavit", Recipe)
    assert (recipe.epochs, recipe.warmup_epochs, recipe.cooldown_epochs, recipe.clip_grad) == (300, 5, 10, None)
    assert (recipe.warmup_lr, recipe.min_lr, recipe.lr_base, recipe.weight_decay) == (1e-6, 1e-5, 5e-4, 0.05)
    assert recipe.model_ema and recipe.model_ema_decay == pytest.approx(
        0.99996 ** (8 * recipe.batch_size / 512), rel=1e-8
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_one_line_of_help(kind):
    for name, field in fields_of(kind).items():
        assert field.text and "\n" not in field.text, name


def test_the_reproduction_is_the_published_one():
    recipe = load_recipe("cifar10", Recipe)
    assert (recipe.opt, recipe.lr, recipe.weight_decay, recipe.min_lr) == ("adam", 3e-4, 1e-5, 0)
    assert (recipe.epochs, recipe.batch_size, recipe.warmup_epochs, recipe.seed) == (100, 256, 0, 42)
    assert (recipe.scale, recipe.rotation, recipe.color_jitter, recipe.hflip) == ((0.6, 1.0), 20, 0.2, 0.5)
    assert (recipe.attention, recipe.img_size, recipe.num_heads) == ("inline", (224, 224), 6)


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path):
    (tmp_path / "a.yaml").write_text("lr: 5e-4\nopt_betas: [0.9, 1e-1]\nimg_size: 32\n")
    recipe = load_recipe(tmp_path / "a.yaml", Recipe)
    assert (recipe.lr, recipe.opt_betas, recipe.img_size) == (5e-4, (0.9, 0.1), (32, 32))


def test_values_may_be_text_as_on_the_command_line():
    recipe = Recipe().replace(
        lr="1e-3", img_size="8,12", epochs="3", clip_grad="none", model_ema="true", settings="num_agents=16,local=false"
    )
    assert (recipe.lr, recipe.img_size, recipe.epochs, recipe.clip_grad) == (1e-3, (8, 12), 3, None)
    assert recipe.model_ema is True
    assert recipe.settings == {"num_agents": 16, "local": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: ten", "epochs must be a whole number, got 'ten'"),
        ("epochs: 1.5", "epochs must be a whole number, got 1.5"),
        ("epochs: 0", "epochs must be at least 1, got 0"),
        ("warmup_epochs: -1", "warmup_epochs must be at least 0, got -1"),
        ("model_ema: 1", "model_ema must be true or false, got 1"),
        ("scale: [0.1, 0.2, 0.3]", "scale must be 2 numbers"),
        ("model: 3", "model must be text, got 3"),
        ("lr: null\nbatch_size: null", "batch_size must be a whole number, got None"),
        ("wamup_epochs: 3", "unknown field in .*: 'wamup_epochs': did you mean warmup_epochs"),
        ("sched: cosin", "unknown sched 'cosin': did you mean cosine?"),
        ("amp: bf6", "unknown amp 'bf6': did you mean bf16"),
        ("mixup: 0.8\nbatch_size: 7", "batch_size 7 is odd; take an even one, or .*--mixup 0"),
        ("- deit", "lines of `field: value`"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_clear_line(text, message, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SubquadError, match=message) as error:
        load_recipe(tmp_path / "a.yaml", Recipe)
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_suggests_the_nearest():
    with pytest.raises(SubquadError, match="unknown recipe 'digit': did you mean digits"):
        load_recipe("digit", Recipe)


def test_a_recipe_file_that_is_missing_is_named():
    with pytest.raises(SubquadError, match=r"no recipe file nowhere.yaml"):
        load_recipe("nowhere.yaml", Recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_agents", "'num_agents' in 'num_agents' is no setting: write name=value"),
        ("a=1,=2", "'=2' in 'a=1,=2' is no setting"),
        ("a=1, a=2", "'a=1, a=2' names a twice"),
        ("a=[1,b=2", "'a=.1' in 'a=.1,b=2' is no list: write a=.1,2,3."),
        ("a=[[1]]", "is no list"),
        (f"a={'9' * 5000}", "a in .* has more than 4096 characters"),
    ],
)
def test_what_is_no_setting_is_said_in_one_line(text, message):
    with pytest.raises(SubquadError, match=message) as error:
        parse_settings(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_settings_are_numbers_words_texts_and_lists_of_them():
    text = "a=3, b=-0.5,c=1e-3,d=TRUE,e=none,f=relu,g='7',h=[4, 9,1.5],i="
    assert parse_settings(text) == {
        "a": 3,
        "b": -0.5,
        "c": 1e-3,
        "d": True,
        "e": None,
        "f": "relu",
        "g": "7",
        "h": [4, 9, 1.5],
        "i": "",
    }


@pytest.mark.parametrize(
    ("kind", "name", "model", "said"),
    [
        ("segment", "camvid_small", "deit_tiny", "embed_dims=[32, 64, 160, 256]"),
        ("detect", "pennfudan_small", "swin_tiny", "embed_dims=[32, 64, 160, 256]"),
        ("segment", "camvid_plain", "pvt_tiny", "embed_dim 96, depth 6, num_heads 3"),
        ("classify", "cifar10", "pvt_tiny", "num_heads 6"),
    ],
)
def test_what_a_recipe_says_of_its_own_model_is_not_blamed_on_who_asks_for_another(kind, name, model, said):
    with pytest.raises(SubquadError, match=f"^the recipe {name} is for .* which {model} does not take") as error:
        TASKS[kind].recipe_of({"model": model}, name)
    assert said in str(error.value) and "\n" not in str(error.value)
    none = {"attention": "none", "settings": "", "patch_size": "none"}
    none |= dict.fromkeys(["embed_dim", "depth", "num_heads"], "none")
    TASKS[kind].check_network(TASKS[kind].recipe_of({"model": model, **none}, name))


def test_a_name_or_setting_of_ones_own_is_blamed_for_itself():
    task = TASKS["segment"]
    for own in ({"model": "deit_tinyy"}, {"model": "deit_tiny", "settings": "embed_dims=[8,8,8,8]"}):
        with pytest.raises(SubquadError, match=r"^unknown"):
            task.check_network(task.recipe_of(own, "camvid_small"))


def test_a_recipe_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().lr = 1
