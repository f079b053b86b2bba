"""Which of the many combinations of hosts and mechanisms are for the slow tests."""

import pytest

OF_ONE_HOST = {"deit3", "dinov2", "dinov2_reg4", "dinov3", "eva02"}
"""Kinds of the plain host, which is tried with every mechanism as DeiT."""

STAND_FOR_ALL = {"softmax", "agent"}
"""Mechanisms that the fast tests try in them, one with and one without tables on the grid."""


def pytest_collection_modifyitems(items):
    for item in items:
        given = getattr(item, "callspec", None)
        if given is None or given.params.get("host") not in OF_ONE_HOST:
            continue
        if given.params.get("attention", "softmax") not in STAND_FOR_ALL:
            item.add_marker(pytest.mark.slow)
