"""Whole runs of methods that train: wrong input, training that diverges, and data on the edge."""

from __future__ import annotations

import pandas as pd
import pytest

from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import summarise, used_runs, varying_setting
from tests.conftest import write_features
from tests.execution.training_runs import TINY
from tests.small_runs import run_in


def one_line(err: str) -> str:
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert line.endswith(")")
    return line


@pytest.mark.slow_cases("fedprotip-1000-30")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("method", "batch_size", "rounds"),
    [
        ("fedavg", 16, 30),
        ("fedavg", 1000, 30),
        ("fedavg", 1000, 2),
        ("fedprotip", 1000, 30),
        ("centralised", 16, 2),
    ],
)
def test_a_diverging_training_is_one_line_and_leaves_no_record(command, images, tmp_path, method, batch_size, rounds):
    """Whether the loss shows it, only the weights (after one step a round), or only what the model makes of a test."""
    knobs = (f"method.training.batch_size={batch_size}", f"method.training.rounds={rounds}", "method.training.lr=1e6")
    code, _, err = command(f"method={method}", *images, *TINY, *knobs, f"out={tmp_path}")
    assert code == 2
    assert "training.lr=1e+06" in one_line(err)
    assert "diverged" in err
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".lock"}
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [".locks"]


#: What was typed after the method -> what the one line must hold.
WRONG = [
    ("backbone=tiny adapt=fedavg", "adapt=fedavg: method={} trains the network itself in every task (adapt=none"),
    ("backbone=pixels", "backbone=pixels has nothing to train (backbone=resnet18_cifar"),
    ("data=features data.path={features}", "backbone=identity has nothing to train"),
    ("data=features data.path={features} backbone=tiny", "backbone=tiny needs images and data=features"),
    ("backbone=tiny method.training.rounds=many", "method.training.rounds=many has the wrong type (an integer)"),
    ("backbone=tiny method.frozen_stages=5", "method.frozen_stages=5 is more than the network has (at most 4"),
]
MORE_WRONG = [
    ("backbone=tiny method.training.lr=fast", "method.training.lr=fast has the wrong type (a number)"),
    (
        "backbone=tiny method.training.rounds=0",
        "method.training.rounds=0 is out of range (an integer from 1 to 1000000)",
    ),
    ("backbone=tiny method.training.schedule=step", "method.training.schedule=step has no milestones"),
    ("backbone=tiny method.training.round=5", "unknown key method.training.round (did you mean method.training.rounds"),
    ("backbone=tiny method.loss_classes=new", "method.loss_classes=new is not known (choices: seen, task"),
    ("backbone=tiny checkpoint_rounds=0", "checkpoint_rounds=0 is out of range"),
    ("backbone=tiny drift=-1", "drift=-1 is out of range"),
]
TYPED = [(method, *line) for method in ("fedprotip", "fot", "centralised") for line in WRONG[:2]]
TYPED += [("fedavg", *line) for line in WRONG + MORE_WRONG]


@pytest.mark.parametrize(("method", "typed", "told"), TYPED, ids=[f"{method} {typed}" for method, typed, _ in TYPED])
def test_what_cannot_be_trained_is_one_line_and_nothing_is_written(command, tmp_path, method, typed, told):
    features = write_features(tmp_path / "features.npz")
    code, _, err = command(f"method={method}", *typed.format(features=features).split(), f"out={tmp_path}/out")
    assert code == 2
    assert told.format(method) in one_line(err)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file != features]


@pytest.mark.slow_cases("fedprotip", "fot")
@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "fot", "centralised"])
def test_tasks_without_a_label_are_passed_by(images, tmp_path, caplog, method):
    """As the analytic methods do; here a class a task, and nobody knows a label of the first one and of the last."""
    scarce = ("tasks=6", "label_rate=0.08", "beta=1", "seed=0", "method.training.rounds=1")
    theory = ("method.theory=2", "method.columns=40") if method in ("fedprotip", "fot") else ()
    outcome = run_in(tmp_path, f"method={method}", *images, *TINY, *scarce, *theory)
    assert "label_rate=0.08 leaves 2 of 6 classes without a label" in caplog.text
    assert pd.read_csv(outcome.folder / "tasks.csv").labelled.tolist() == [0, 1, 1, 1, 1, 0]


@pytest.mark.slow
def test_tables_average_over_seeds_and_keep_the_test_protocols_apart(images, tmp_path):
    """A network from scratch has other weights with every seed; a test on task-pure batches is another column."""
    common = (*images, *TINY, "method.training.rounds=1", "method.columns=40", "method=fedprotip")
    for choice in (("seed=0",), ("seed=1", "drift=2"), ("seed=0", "method.tip.route=batch")):
        run_in(tmp_path, *common, *choice)
    summary = summarise(used_runs(collect(tmp_path / "runs")))
    found = {row["protocol"]: row["n"] for _, row in summary.iterrows()}
    assert found == {"task-agnostic": 2, "task-pure batches of 64": 1}
    assert "protocol" in varying_setting(summary)
