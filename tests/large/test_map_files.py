"""Maps of large images as files: whole or not at all, and refusals that name the file that was asked for."""

import numpy as np
import pytest

from subquad import writing
from subquad.errors import SubquadError
from subquad.large.map_files import map_file


def test_what_a_format_does_not_hold_is_said_of_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(SubquadError) as caught, map_file(tmp_path / "heat.png", (4, 5), np.float32):
        pass
    assert str(caught.value).startswith(f"{tmp_path / 'heat.png'}: a PNG holds labels")
    assert not list(tmp_path.iterdir())


def test_folders_that_a_killed_process_left_aside_are_removed(tmp_path):
    left = tmp_path / ".heat.zarr.999999999-00000000.unfinished"
    (left / "c").mkdir(parents=True)
    kept = left.rename(tmp_path / left.name.replace("00000000", writing._host()))
    (tmp_path / "other").mkdir()
    writing.sweep(tmp_path)
    assert not kept.exists() and (tmp_path / "other").exists()
