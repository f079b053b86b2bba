"""What the README shows works as shown."""

import re
import shlex
from pathlib import Path

import pytest

from subquad import ATTENTION
from subquad.cli import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_code_of_the_readme_runs():
    room: dict = {}
    for code in re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), flags=re.DOTALL):
        exec(code, room)
    assert room["y"].shape == (2, 6, 281, 32) and room["w"].shape == (2, 6, 1, 281, 281)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_is_one_that_the_program_takes(page):
    for line in commands_of(page):
        # the parser raises where it does not know a word
        assert callable(make_parser().parse(shlex.split(line)).run), line


def commands_of(page):
    return re.findall(r"^    (?:torchrun .* -m )?subquad (.*?)(?:  +#.*)?$", page.read_text(), flags=re.MULTILINE)


IS_WORD = re.compile(r"[a-z]+(-[a-z]+)*").fullmatch


def test_the_pages_show_every_command():
    shown = {tuple(word for word in line.split()[:2] if IS_WORD(word)) for page in PAGES for line in commands_of(page)}
    words = {word for line in shown for word in line[:1]}
    commands = set(make_parser()._subparsers._group_actions[0].choices)
    assert words >= commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
        assert (page.parent / target).exists(), target


def test_every_mechanism_has_its_paper():
    table = PAGES[0].read_text().partition("## The papers")[2]
    assert {name for name in ATTENTION if f"`{name}`" not in table} <= {"softmax"}
