"""The table of defaults has every method that a small network or its features can train, and its runs compose."""

from __future__ import annotations

import pytest

from benchmarks.defaults import METHODS, OLD, last, typed
from fcl_bench.api.making import settings_of
from fcl_bench.methods.gradient.base import GradientMethod
from tests.small_methods import NAMES, architecture


@pytest.mark.slow_cases("features", "images")
@pytest.mark.parametrize("stream", METHODS)
def test_every_run_composes_with_present_and_old_defaults(stream):
    for method in METHODS[stream]:
        present = typed(method, stream, "device=cpu", *(["data.path=FILE"] if stream == "features" else []))
        new, _ = settings_of(present)
        old, _ = settings_of(last([*present, *OLD.get(method, [])]))
        assert new.method.name == method
        assert (old.method == new.method) == (method not in OLD)
        assert not isinstance(new.method, GradientMethod) or new.method.training.rounds in (12, 20)


def test_no_method_is_left_out_but_those_inside_transformers_and_a_slow_one():
    inside = {name for name in NAMES if architecture(name) == "vit"}
    assert {*METHODS["features"], *METHODS["images"]} == ({*NAMES} - inside - {"fedcbc"}) | {"regmean"}
