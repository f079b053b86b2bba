"""Imports go one way, hosts name no mechanism, and importing the library stays light."""

import ast
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from subquad import ATTENTION
from subquad.kernels import KERNELS
from subquad.models import HOSTS
from subquad.tasks import TASKS

SOURCE = Path(__file__).parents[1] / "src" / "subquad"
# a room may import those before it; rooms on one line may not import each other unless they say so below
ORDER = [
    [
        "starting",
        "errors",
        "text",
        "timing",
        "command_table",
        "substituting",
        "besides",
        "instructions",
        "keeping_memory",
        "uninterrupted",
    ],
    ["home", "ranges", "reading", "writing", "plugins", "optimizers", "copying"],
    ["holding", "flags"],
    ["tracing"],
    ["grid"],
    ["spread"],
    ["kernels"],
    ["positions", "rope"],
    ["ops"],
    ["attention"],
    ["weights"],
    ["models"],
    ["inference"],
    ["data"],
    ["large"],
    ["tasks"],
    ["runs"],
    ["training", "diffusion"],
    ["analysis", "benchmarks"],
    ["conversion", "exports"],
    ["advice"],
    ["pages"],
    ["api"],
    ["cli"],
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(SOURCE.rglob("*.py"))
HOST_FILES = [SOURCE / "models" / "layers.py", *(Path(inspect.getfile(host)) for host in HOSTS.values())]
# what is of classifiers only: timm's networks, and the accuracy of one that is looked into
IMAGES_OF = {"subquad.tasks.classification"}
OF_CLASSIFIERS = {
    "api": {"classify"},
    "timm_classifiers": {"classify"},
    "opened_networks": {"classify"},
    "run_records": {"classify"},
    "study": IMAGES_OF,
    "query_maps": IMAGES_OF,
}
HEAVY = {"triton", "diffusers", "matplotlib", "sklearn", "accelerate", "tensorboard", "datasets", "transformers"}


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    assert room in RANK, f"{room} has no place in the order of imports: give it one here and in docs/design.md"
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] == "subquad" and len(parts) > 1 and parts[1] != room:
            assert RANK[parts[1]] < RANK[room], f"{path.relative_to(SOURCE)} imports {module}"


def test_no_modules_import_each_other_in_a_circle():
    """Not even where a function imports what it needs: the order of rooms says it of rooms, this of all modules."""
    modules = {module_of(path): path for path in FILES}
    left = {
        module: {needed for needed in needs_of(path, modules) if needed != module} for module, path in modules.items()
    }
    # modules that need nothing that is left can't be in a circle
    while free := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in free}
    assert not {module: sorted(needed & left.keys()) for module, needed in left.items()}


def module_of(path):
    return ".".join(("subquad", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def needs_of(path, modules):
    """The modules that a file imports anywhere, but for what only a type checker reads."""
    waiting = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def test_the_page_of_the_design_has_every_room():
    layout = (SOURCE.parents[1] / "docs" / "design.md").read_text().partition("## Who computes")[0]
    named = {word.rstrip(":;,") for word in layout.split()}
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert [room for room in sorted(rooms) if not {f"{room}.py", f"{room}/"} & named] == []


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in FILES if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []


WITHOUT_TASKS = [room for room in RANK if RANK[room] > RANK["tasks"]]
"""Rooms that know tasks by their protocol alone."""


@pytest.mark.parametrize("room", WITHOUT_TASKS)
def test_no_task_is_named_outside_of_its_folder(room):
    folders = {path.parent.name for path in (SOURCE / "tasks").glob("*/__init__.py")}
    assert len(folders) == len(TASKS)
    for path in sorted((SOURCE / room).rglob("*.py")) or [SOURCE / f"{room}.py"]:
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not strings & TASKS.keys() - OF_CLASSIFIERS.get(path.stem, set()), path
        imported = {module for module in imports_of(path) if module.split(".")[1:2] == ["tasks"]}
        named = {module for module in imported if module.split(".")[2:3] and module.split(".")[2] in folders}
        assert not named - OF_CLASSIFIERS.get(path.stem, set()), path


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: path.name)
def test_hosts_name_no_mechanism(path):
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not strings & ATTENTION.keys()
    # what a mechanism says of itself, whichever it is, and bricks, which are of none
    of_mechanisms = {module for module in imports_of(path) if module.startswith("subquad.attention")}
    assert of_mechanisms <= {"subquad.attention.traits", "subquad.attention.bricks"}


WAY = {
    "models": {"attention"},
    "attention": {"ops"},
    "ops": {"kernels"},
}
"""From a host to a kernel: of these rooms each knows the next alone."""
LISTS_BACKENDS = "listing"


@pytest.mark.parametrize("room", WAY)
def test_tokens_pass_three_rooms_from_a_host_to_a_kernel(room):
    beyond = {"attention", "ops", "kernels"} - WAY[room] - {room}
    for path in sorted((SOURCE / room).rglob("*.py")):
        rooms = {module.split(".")[1] for module in imports_of(path) if module.startswith("subquad.")}
        assert path.stem == LISTS_BACKENDS or not rooms & beyond, path


@pytest.mark.parametrize("path", sorted((SOURCE / "ops").glob("*.py")), ids=lambda path: path.name)
def test_formulas_know_no_backend(path):
    strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert not strings & KERNELS.keys()
    assert not any(module.startswith(("subquad.kernels.cpu", "subquad.kernels.triton")) for module in imports_of(path))


@pytest.mark.slow
def test_importing_subquad_imports_nothing_heavy():
    # torch itself may load triton
    code = (
        "import sys, torch, timm; before = set(sys.modules); import subquad; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "subquad" in loaded and not HEAVY & set(loaded)
