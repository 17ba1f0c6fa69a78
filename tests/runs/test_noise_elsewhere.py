"""Noise where clients are in other processes, and where uploads are added up on their way to the server."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.flower.town import Town, reached
from tests.small_runs import run_in

pytest.importorskip("dp_accounting", reason="pip install '.[privacy]'")

SMALL = ("data=digits", "tasks=2", "clients=5", "beta=1", "track=none")
NOISE = ("noise=gaussian", "noise.multiplier=0.05")
UPDATES = ("noise=gaussian", "noise.unit=client", "noise.multiplier=0.05")
TRAINED = ("method=finetune", "method.on=features", "method.training.rounds=2", "method.training.epochs=1")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr("fcl_bench.runs.run.drawn", lambda *_: {})


def tensors(outcome) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in load_file(outcome.folder / "model.safetensors").items()}


@pytest.mark.parametrize("method", [("fedlda",), ("afl", "method.upload=sums")])
@pytest.mark.parametrize("way", [("transport=tree", "transport.fan_in=2"), ("secure=sums",)])
def test_sums_on_the_way_are_solved_with_the_noise_of_all_who_are_in_them(tmp_path, method, way):
    name, *more = method
    given = (*SMALL, f"method={name}", *more, "wire.dtype=float64", *NOISE)
    if way == ("secure=sums",):
        pytest.importorskip("cryptography")
    alone, summed = (tensors(run_in(tmp_path, *given, *own)) for own in ((), way))
    for key, tensor in alone.items():
        assert np.abs(summed[key] - tensor).max() <= 1e-5 * np.abs(tensor).max(), key


@pytest.mark.parametrize(
    "given",
    [
        ("method=stsa", *NOISE, "faults=listed", "faults.late=[1@0]", "faults.silent=[2@1]", "predictions=true"),
        (*TRAINED, *UPDATES, "faults=listed", "faults.silent=[2@1]", "evaluate_rounds=1"),
    ],
)
def test_the_noise_of_a_client_is_the_same_wherever_it_lives(tmp_path, monkeypatch, given):
    town = Town(tmp_path / "nodes")
    town.settle(0, 3)
    town.settle(1, 2, 4)
    one = run_in(tmp_path / "here", *SMALL, *given)
    with reached(town, monkeypatch):
        many = run_in(tmp_path / "there", *SMALL, *given, "transport=flower")
    names = {path.name for path in one.folder.iterdir()}
    assert names == {path.name for path in many.folder.iterdir()}
    for name in {name for name in names if name.endswith((".npz", ".safetensors"))}:
        assert (many.folder / name).read_bytes() == (one.folder / name).read_bytes(), name
    for part in ("run_id", "metrics", "communication", "privacy", "absences"):
        assert many.record[part] == one.record[part], part
