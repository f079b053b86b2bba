"""What the README shows works as shown."""

import re
import shlex
from pathlib import Path

import pytest

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
    for line in re.findall(r"^    (?:torchrun .* -m )?subquad (.*?)(?:  +#.*)?$", page.read_text(), flags=re.MULTILINE):
        make_parser().parse(shlex.split(line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
        assert (page.parent / target).exists(), target
