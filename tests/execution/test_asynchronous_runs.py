"""Runs whose clients are out of step: what equals the synchronous run, what ends where it ends, and who refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fcl_bench.data.sources import digits
from fcl_bench.errors import UserError
from fcl_bench.methods.closed_form.base import ClosedFormMethod
from tests.execution.test_ranks import finished, same_but_for_the_clock, started
from tests.small_methods import NAMES, class_of, made, short_run
from tests.small_runs import interrupted_in, run_in

USUAL = ("tasks=4", "clients=4", "beta=0.5")
#: FedAvg of class weights on features.
HEADS = ("method=fedavg", "method.trains=features", "method.training.rounds=2", "method.training.epochs=1")
OUT_OF_STEP = ("split=asynchronous", "split.speed=lognormal", "tasks=6", "split.groups=4", "clients=4", "beta=0.5")
#: What a run measures that is not seconds.
MEASURED = ("accuracy_matrix.csv", "task_aware_matrix.csv", "class_accuracy.csv", "client_accuracy.csv")
#: Methods in closed form whose statistics are sums over samples, so that nothing depends on their order.
SUMS = [name for name in NAMES if issubclass(class_of(name), ClosedFormMethod) and made(name).ignores_partition]

#: FedKLDA takes its bandwidth from the first step, and AIR its weights from each step's counts, unless they are told.
TOLD = {"fedklda": ("method.bandwidth=20",), "air": ("method.correction=logits",)}


def model_by_label(outcome):
    """The class weights, in ascending order of the data set's labels."""
    order = np.load(outcome.folder / "confusion.npz")["class_order"]
    return load_file(outcome.folder / "model.safetensors")["W"][:, np.argsort(order)]


@pytest.mark.parametrize("method", [("method=afl",), HEADS], ids=["afl", "fedavg"])
def test_one_order_and_speed_give_the_synchronous_numbers_bit_for_bit(method, tmp_path):
    usual = run_in(tmp_path, *method, *USUAL)
    ours = run_in(tmp_path, *method, *USUAL, "split=asynchronous", "split.order=same")
    assert usual.folder != ours.folder
    assert ours.record["metrics"] == usual.record["metrics"]
    compared = [name for name in MEASURED if (usual.folder / name).exists()]
    assert "accuracy_matrix.csv" in compared
    for name in compared:
        assert (ours.folder / name).read_bytes() == (usual.folder / name).read_bytes()
    one, other = (load_file(run.folder / "model.safetensors") for run in (usual, ours))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "afl" else pytest.mark.slow) for n in SUMS])
def test_sums_end_where_the_synchronous_stream_ends(name, tmp_path):
    method = (*short_run(name), *TOLD.get(name, ()), "wire.dtype=float64")  # float32 on the wire rounds by 1e-7
    if "W" not in load_file((usual := run_in(tmp_path, *method, *USUAL)).folder / "model.safetensors"):
        pytest.skip("no class weights")
    expected = model_by_label(usual)
    for order, speed, missing in (("shifted", "constant", 0), ("independent", "lognormal", 0.3)):
        knobs = (f"split.order={order}", f"split.speed={speed}", f"split.missing={missing}")
        found = model_by_label(run_in(tmp_path, *method, *OUT_OF_STEP, *knobs))
        assert np.abs(found - expected).max() <= 1e-9 * np.abs(expected).max()


def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, monkeypatch):
    whole = run_in(tmp_path / "whole", *HEADS, *OUT_OF_STEP)
    with interrupted_in(3, monkeypatch):
        run_in(tmp_path / "killed", *HEADS, *OUT_OF_STEP)
    again = run_in(tmp_path / "killed", *HEADS, *OUT_OF_STEP)
    assert again.record["metrics"] == whole.record["metrics"]
    for name in ("accuracy_matrix.csv", "model.safetensors"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_client_is_tested_on_the_classes_that_it_has_had(tmp_path):
    outcome = run_in(tmp_path, "method=afl", *OUT_OF_STEP)
    of_class, of_client = (
        np.genfromtxt(outcome.folder / f"{name}_accuracy.csv", delimiter=",", skip_header=1)
        for name in ("class", "client")
    )
    labels, parts = digits.Digits().load().train.labels, np.load(outcome.folder / "partition.npz")
    had = np.concatenate([parts[f"train_t{t}_c1"] for t in range(3)])
    counts = np.array([(labels[had] == label).sum() for label in parts["class_order"]])
    tested = ~np.isnan(of_class[2]) & (counts > 0)
    expected = (counts * np.nan_to_num(of_class[2]))[tested].sum() / counts[tested].sum()
    assert of_client[1, 1 + 2] == pytest.approx(expected, abs=1e-9)
    assert 0 < len(np.flatnonzero(counts)) < 10  # it has not had all classes


@pytest.mark.slow
def test_ranks_and_a_tree_leave_what_one_process_does(tmp_path):
    runs = [
        (*OUT_OF_STEP, "threads=1", *method) for method in (("method=afl",), HEADS, ("method=scaffold", *HEADS[1:]))
    ]
    told, _ = finished(started(tmp_path, [{"overrides": run} for run in runs]))
    for run, line in zip(runs, told.splitlines(), strict=True):
        same_but_for_the_clock(Path(line.split(" ", 1)[1]), run_in(tmp_path / "alone", *run).folder)
    summed = (*OUT_OF_STEP, "method=stsa", "method.M=96", "wire.dtype=float64")
    alone, tree = run_in(tmp_path, *summed), run_in(tmp_path / "tree", *summed, "transport=tree", "transport.fan_in=2")
    one, other = model_by_label(tree), model_by_label(alone)
    assert np.abs(one - other).max() <= 1e-9 * np.abs(other).max()


@pytest.mark.parametrize("name", [name for name in NAMES if class_of(name).common_tasks])
def test_methods_with_common_tasks_refuse_before_any_work(name, tmp_path):
    with pytest.raises(UserError, match=f"method={name} needs tasks that all clients learn") as refused:
        run_in(tmp_path, *short_run(name), *OUT_OF_STEP)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not class_of(name).common_tasks])
def test_every_other_method_runs(name, tmp_path):
    record = run_in(tmp_path, *short_run(name), *OUT_OF_STEP).record
    assert all(np.isfinite(value) for value in record["metrics"]["accuracy"])


#: ||W - W'|| / ||W'|| of docs/results/asynchronous.md, W' of the synchronous stream, at `SCHEDULES`.
DISTANCES = {
    ("fedran", "method.M=256", "method.rank=64"): (0.42, 0.47, 0.36, 0.37),
    ("centred_sketch", "method.M=256", "method.rank=16"): (0.00, 0.00, 0.22, 0.31),
    ("gaussian_sketch", "method.M=256", "method.rank=16"): (0.13, 0.12, 0.34, 0.34),
}
SCHEDULES = (
    ("shifted", "constant"),
    ("independent", "constant"),
    ("independent", "lognormal"),
    ("independent", "stragglers"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "printed"), DISTANCES.items(), ids=[method[0] for method in DISTANCES])
def test_what_truncates_ends_as_far_away_as_the_page_says(method, printed, tmp_path):
    problem = (f"method={method[0]}", *method[1:], "wire.dtype=float64", "tasks=5", "clients=5", "beta=0.5")
    usual = model_by_label(run_in(tmp_path, *problem))
    for (order, speed), distance in zip(SCHEDULES, printed, strict=True):
        knobs = ("split=asynchronous", f"split.order={order}", f"split.speed={speed}")
        found = model_by_label(run_in(tmp_path, *problem, *knobs))
        assert np.linalg.norm(found - usual) / np.linalg.norm(usual) == pytest.approx(distance, abs=0.0051)
