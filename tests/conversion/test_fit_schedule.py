"""The rate rises for a twentieth of the way and falls to nothing; time counts where it runs out first."""

import pytest

from subquad.conversion.fit_schedule import WARM_UP, Schedule
from subquad.errors import SubquadError


def test_the_rate_rises_and_falls_to_nothing():
    schedule = Schedule(updates=100, lr=0.5)
    assert schedule.rate(0) == pytest.approx(0.005)
    assert schedule.rate(WARM_UP / 2) == pytest.approx(0.25)
    assert schedule.rate(WARM_UP) == 0.5
    assert schedule.rate((1 + WARM_UP) / 2) == pytest.approx(0.25)
    assert schedule.rate(1) == pytest.approx(0, abs=1e-12)


def test_the_way_is_that_of_the_updates_or_of_the_time_where_that_is_further():
    assert Schedule(updates=10).share(5, 1000.0) == 0.5
    assert Schedule(updates=10, time_budget=100).share(5, 80.0) == 0.8
    assert Schedule(updates=10, time_budget=100).share(5, 20.0) == 0.5


def test_an_optimizer_is_one_that_is_there():
    with pytest.raises(SubquadError, match="unknown optimizer 'adamv'"):
        Schedule(opt="adamv")
