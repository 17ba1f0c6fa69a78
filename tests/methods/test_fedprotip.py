"""Whole runs of FedProTIP: its record, its files, its protocols, its knobs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fcl_bench.errors import UserError
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.results.collect import collect
from fcl_bench.results.summarise import summarise, used_runs, varying_setting
from fcl_bench.training.knobs import add_weight_decay
from fcl_bench.typed import typed_instance
from tests.methods import fedprotip_oracle as oracle
from tests.methods.fedprotip_harness import (
    HEADS,
    SMALL,
)
from tests.small_runs import run_in


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs in one folder that differ in how a task is predicted."""
    out = tmp_path_factory.mktemp("runs")
    routes = {"sample": "method.theory=3", "batch": "method.tip.route=batch", "false": "method.tip=false"}
    return out, {name: run_in(out, *SMALL, override) for name, override in routes.items()}


def test_the_record_tells_how_often_the_task_was_right(runs):
    record = runs[1]["sample"].record
    matrix = pd.read_csv(runs[1]["sample"].folder / "routing_matrix.csv").to_numpy()
    tests = pd.read_csv(runs[1]["sample"].folder / "tasks.csv").test_samples.to_numpy()
    routing = record["routing"]
    assert routing["accuracy"][0] == 100
    np.testing.assert_allclose(routing["by_task"], matrix[-1])
    pooled = [np.average(matrix[t, : t + 1], weights=tests[: t + 1]) for t in range(3)]
    np.testing.assert_allclose(routing["accuracy"], pooled)
    assert record["protocol"] == "task-agnostic"


def test_what_a_run_reaches_without_its_routes_is_what_the_run_without_tip_reaches(runs):
    with_tip, without = runs[1]["sample"].record, runs[1]["false"].record
    assert with_tip["routing"]["unrouted"] == without["metrics"]
    assert with_tip["task_aware"] == without["task_aware"]
    assert without["routing"] is None
    models = [load_file(runs[1][name].folder / "model.safetensors") for name in ("sample", "false")]
    assert torch.equal(models[0]["W"], models[1]["W"])
    references = {f"reference.{k}.{t}" for k in range(3) for t in range(3)}
    # Heads that train freely have no bases unless tasks are told by them.
    assert models[0].keys() - models[1].keys() == references | {f"basis.{t}.heads" for t in range(3)}


@pytest.mark.parametrize("name", ["sample", "batch", "false"])
def test_knowing_the_task_never_hurts(runs, name):
    record = runs[1][name].record
    for measure in ("A_T", "A_avg"):
        assert record["task_aware"][measure] >= record["metrics"][measure]
    assert all(
        aware >= agnostic
        for aware, agnostic in zip(record["task_aware"]["accuracy"], record["metrics"]["accuracy"], strict=True)
    )
    if record["routing"]:
        assert all(
            routed >= right
            for routed, right in zip(record["routing"]["accuracy"], record["metrics"]["accuracy"], strict=True)
        )


def test_task_pure_batches_are_said_in_the_record_and_never_in_a_row_with_single_samples(runs):
    out, outcomes = runs
    assert outcomes["batch"].record["protocol"] == "task-pure batches of 64"
    summary = summarise(used_runs(collect(out / "runs")))
    by_protocol = summary.groupby("protocol").label.nunique().to_dict()
    assert by_protocol == {"task-agnostic": 2, "task-pure batches of 64": 1}
    assert summary.n.tolist() == [1, 1, 1]
    assert "protocol" in varying_setting(summary)
    assert summary.label.nunique() == 3


def test_the_ledger_has_every_stage_and_its_bytes(runs):
    outcome = runs[1]["sample"]
    uploads = pd.read_csv(outcome.folder / "uploads.csv")
    for _, rows_ in uploads.groupby(["task", "client"]):
        assert rows_.sort_values("round").stage.tolist() == ["model", "model", "bases", "references"]
    without = pd.read_csv(runs[1]["false"].folder / "uploads.csv")
    assert set(without.stage) == {"model", "bases"}
    assert set(runs[1]["false"].record["communication"]["by_stage"]) == {"model", "bases"}
    by_stage = outcome.record["communication"]["by_stage"]
    assert set(by_stage) == {"model", "bases", "references"}
    for stage, totals in by_stage.items():
        own = uploads[uploads.stage == stage]
        assert totals["up_total_bytes"] == own.up_bytes.sum()
        assert totals["down_total_bytes"] == own.down_bytes.sum()
        assert totals["up_max_bytes"] == own.groupby(["task", "client"]).up_bytes.sum().max()
    assert outcome.record["communication"]["up_max_bytes"] == uploads.groupby(["task", "client"]).up_bytes.sum().max()
    # By hand: a reference has an entry per task so far; 4, 3 and 3 classes make the heads.
    references = uploads[uploads.stage == "references"]
    assert (references.up_bytes == 4 * (references.task + 1)).all()
    model = uploads[uploads.stage == "model"].groupby("task").up_bytes.unique().map(list).to_dict()
    projected = 4 * 8 * 9 + 8 * 16 * 9 + 16 * 32 * 9
    whole = 3 * 4 * 9 + projected + 4 * (4 + 8 + 16 + 32)
    classes = [
        end - begin
        for begin, end in zip(
            [0, *pd.read_csv(outcome.folder / "tasks.csv").classes_seen],
            pd.read_csv(outcome.folder / "tasks.csv").classes_seen,
            strict=False,
        )
    ]
    assert model == {
        0: [4 * (whole + 33 * classes[0]) + 8],
        1: [4 * (projected + 33 * classes[1]) + 8],
        2: [4 * (projected + 33 * classes[2]) + 8],
    }
    report = outcome.record["report"]
    # Down, to each client in the first round of the second task: all of the model, and the bases but the head's, which
    # it has had for its reference; later only what changes. Beside them the round, the step size, classes per task.
    down = uploads[(uploads.task == 1) & (uploads.stage == "model")].groupby("round").down_bytes.unique().map(list)
    first = sum(report["dimensions"][layer] * ranks[0] for layer, ranks in report["ranks"].items() if layer != HEADS)
    control = 8 + 8 + 4 * 2
    assert down[0] == [4 * (whole + 33 * classes[0] + 33 * classes[1] + first) + control]
    assert down[1] == [4 * (projected + 33 * classes[1]) + control]
    assert report["dimensions"] == {"body.stage2.0": 36, "body.stage3.0": 72, "body.stage4.0": 144, HEADS: 32}
    bases = load_file(outcome.folder / "model.safetensors")
    assert report["ranks"] == {
        layer: [bases[f"basis.{t}.{layer}"].shape[1] for t in range(3)] for layer in report["dimensions"]
    }


def test_the_model_file_alone_routes_and_predicts_as_the_run_did(runs):
    from fcl_bench.backbones.tiny import Tiny
    from fcl_bench.data.sources.digits import Digits

    outcome = runs[1]["sample"]
    model, data = load_file(outcome.folder / "model.safetensors"), Digits().load()
    network = Tiny(width=4).trainable(data, 0)
    body = network.build().eval()
    body.load_state_dict(
        {name.removeprefix("body."): value for name, value in model.items() if name.startswith("body.")}
    )
    pixels = np.stack([np.asarray(data.test.inputs[i]) for i in range(len(data.test))])
    images = (torch.from_numpy(pixels).float()[:, None].expand(-1, 3, -1, -1) / 255 - 0.5) / 0.5
    with torch.no_grad():
        features = body(images)
    bases = [model[f"basis.{t}.{HEADS}"].double().numpy() for t in range(3)]
    references = np.zeros((3, 3, 3))
    for k in range(3):
        for t in range(3):
            references[k, t, : t + 1] = model[f"reference.{k}.{t}"].numpy()
    routed, _ = oracle.route(
        oracle.relevance(features.double().numpy(), bases), references, np.ones((3, 3), dtype=bool)
    )
    seen = pd.read_csv(outcome.folder / "tasks.csv").classes_seen.to_numpy()
    task_of_column = np.searchsorted(seen, np.arange(10), side="right")
    scores = (features @ model["W"] + model["bias"]).numpy()
    predicted = np.where(task_of_column == routed[:, None], scores, -np.inf).argmax(axis=1)
    right = model["class_order"].numpy()[predicted] == data.test.labels
    assert 100 * right.mean() == pytest.approx(outcome.record["metrics"]["A_T"], abs=0.5)


#: As typed, and what the one line must hold.
WRONG = [
    (
        "method.tip=maybe",
        "method.tip=maybe has the wrong type (keys of its own: route, batch, references, clients, rule)",
    ),
    ("method.tip.route=x", "method.tip.route=x is not known (choices: batch, sample)"),
    ("+method.tip.foo=1", "unknown key method.tip.foo (a key listed in the YAML)"),
    ("method.tip.batch=0", "method.tip.batch=0 is out of range (an integer of at least 1)"),
    ("method.threshold=0", "method.threshold=0.0 is out of range (above 0, at most 1)"),
    ("method.sketch=0", "method.sketch=0 is out of range (an integer of at least 1)"),
    ("method.sketch=wide", "method.sketch=wide is not known (choices: layer, or an integer of at least 1)"),
    (
        "method.frozen_stages=5",
        "method.frozen_stages=5 is more than the network has (at most 4: stage1, stage2, stage3, stage4)",
    ),
    ("method.training.momentum=1", "method.training.momentum=1.0 is out of range (0 or more, below 1)"),
    ("adapt=fedavg", "adapt=fedavg: method=fedprotip trains the network itself in every task"),
]


@pytest.mark.parametrize(("typed", "told"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_knobs_are_one_line_and_exit_code_2(command, tmp_path, typed, told):
    key = typed.split("=")[0]
    code, _, err = command(*(choice for choice in SMALL if choice.split("=")[0] != key), typed, f"out={tmp_path}")
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert line.endswith(")")
    assert not list(tmp_path.rglob("run.json"))


#: Knobs of the group, and what is told of them.
OTHERS = [
    ({"tip": {"route": "samples"}}, "method.tip.route=samples is not known (did you mean sample?"),
    ({"tip": {"batch": 2.5}}, "method.tip.batch=2.5 has the wrong type (an integer)"),
    ({"threshold_step": -0.1}, "method.threshold_step=-0.1 is out of range (a finite number, 0 or more)"),
    ({"mass": "trace"}, "method.mass=trace is not known (choices: energy, sum)"),
    ({"columns": 0}, "method.columns=0 is out of range (an integer of at least 1)"),
    ({"theory": -1}, "method.theory=-1 is out of range (an integer of at least 0)"),
    ({"loss_classes": "old"}, "method.loss_classes=old is not known (choices: seen, task)"),
    ({"foo": 1}, "unknown key method.foo"),
    ({"tip": 3}, "method.tip=3 has the wrong type"),
    ({"tip": {"route": None}}, "method.tip.route="),
    ({"tip": {"batch": -4}}, "method.tip.batch=-4 is out of range"),
    ({"tip": {"batch": "many"}}, "method.tip.batch=many has the wrong type (an integer)"),
    ({"tip": {"batch": True}}, "has the wrong type (an integer)"),
    ({"tip": {"batch": None}}, "has the wrong type (an integer)"),
    ({"threshold": 1.01}, "method.threshold=1.01 is out of range"),
    ({"threshold": float("nan")}, "method.threshold=nan is out of range"),
    ({"threshold": "high"}, "method.threshold=high has the wrong type (a number)"),
    ({"threshold_step": float("inf")}, "method.threshold_step=inf is out of range"),
    ({"columns": None}, "method.columns=null has the wrong type (an integer)"),
    ({"sketch": 2.5}, "method.sketch=2.5 has the wrong type (an integer or a text or null)"),
    ({"frozen_stages": -1}, "method.frozen_stages=-1 is out of range (an integer of at least 0)"),
    ({"frozen_heads": "maybe"}, "method.frozen_heads=maybe has the wrong type (true or false)"),
]


@pytest.mark.parametrize(("knobs", "told"), OTHERS, ids=str)
def test_other_wrong_knobs_name_key_and_value(knobs, told):
    with pytest.raises(UserError) as error:
        typed_instance(FedProTIP, knobs, "method")
    assert told in str(error.value)


def test_weight_decay_is_torchs_own():
    """`add_weight_decay` in the gradients gives the steps of `torch.optim.SGD(weight_decay=...)`."""
    ours, theirs = (nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
    plain = torch.optim.SGD([ours], lr=0.1, momentum=0.9)
    torchs = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=5e-2)
    for step in range(5):
        for weight in (ours, theirs):
            weight.grad = torch.full_like(weight, float(step))
        add_weight_decay([ours], 5e-2)
        plain.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
