"""A whole run of every method: twice alike, and interrupted and resumed; tests/conformance resumes without files."""

from __future__ import annotations

import pytest

from tests.repeated_sums import refuse_sums_in_any_order
from tests.small_methods import NAMES, short_run, trains_by_gradient
from tests.small_runs import interrupted_in, run_in

#: The others take minutes together.
QUICK = "stsa"


@pytest.mark.slow_cases("stsa")
@pytest.mark.parametrize(
    "method", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_method_runs_twice_alike_and_resumes_bit_for_bit(method, tmp_path, monkeypatch):
    choice = (*short_run(method), "tasks=3", "clients=3", "wire.gram=packed", "wire.columns=held")
    with monkeypatch.context() as patch:
        refuse_sums_in_any_order(patch)
        whole = run_in(tmp_path / "whole", *choice)
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "parts", *choice)
    parts = run_in(tmp_path / "parts", *choice)
    assert parts.record["metrics"] == whole.record["metrics"]
    assert parts.record["report"] == whole.record["report"]
    for name in ("model.safetensors", "accuracy_matrix.csv"):
        assert (parts.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    if not trains_by_gradient(method):
        assert whole.record["metrics"]["A_T"] > 60
    assert whole.record["method_revision"] >= 1
