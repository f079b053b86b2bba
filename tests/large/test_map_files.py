"""Maps of large images as files: whole or not at all, and refusals that name the file that was asked for."""

import numpy as np
import pytest

from subquad.errors import SubquadError
from subquad.large.map_files import map_file


def test_what_a_format_does_not_hold_is_said_of_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(SubquadError) as caught, map_file(tmp_path / "heat.png", (4, 5), np.float32):
        pass
    assert str(caught.value).startswith(f"{tmp_path / 'heat.png'}: a PNG holds labels")
    assert not list(tmp_path.iterdir())
