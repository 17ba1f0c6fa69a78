"""The apps of fcl_bench.flower where Flower is not installed."""

from __future__ import annotations

import pytest

from fcl_bench import flower
from fcl_bench.errors import UserError


@pytest.mark.parametrize("name", flower.__all__)
def test_without_flower_one_line_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(flower, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"fcl_bench\.flower\.{name} needs Flower.*pip install '\.\[flower\]'"):
        getattr(flower, name)


def test_any_other_name_is_unknown():
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        flower.Server  # noqa: B018
