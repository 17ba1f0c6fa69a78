"""Knobs of the first stage: what they change, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from fcl_bench.backbones.backbone import weights_hash
from fcl_bench.engine.in_process import Here
from fcl_bench.errors import UserError
from fcl_bench.execution.adapt import adaptation_identity
from fcl_bench.execution.inputs import prepare_inputs
from fcl_bench.methods.averaging.first_stage import FedAvgAdaptation
from fcl_bench.typed import typed_instance
from tests.execution.adaptation_runs import SMALL, STSA, plan_of
from tests.small_runs import run_in, settings_for


@pytest.mark.slow
def test_adaptation_helps_on_the_task_that_it_saw(tmp_path):
    """The untrained network's features against the adapted one's, after the first task."""
    choice = ("adapt.training.rounds=6", "beta=100")
    after = run_in(tmp_path, *STSA, *choice).record
    before = run_in(tmp_path, *(knob for knob in STSA if not knob.startswith("adapt")), "beta=100").record
    assert before["adaptation"] is None
    assert after["metrics"]["accuracy"][0] > before["metrics"]["accuracy"][0]


@pytest.mark.slow
def test_what_differs_is_not_taken_over(tmp_path):
    """In a 16-bit type uploads are decoded in the statistics' dtype, so the sums differ in their last bits."""
    choice = (*STSA, "wire.dtype=bfloat16", "adapt.training.rounds=2")
    plans = [plan_of(tmp_path / dtype, *choice, f"dtype={dtype}") for dtype in ("float64", "float32")]
    first, second = (weights_hash(prepare_inputs(plan, tmp_path, Here()).adapted.body) for plan in plans)
    assert first != second
    assert adaptation_identity(plans[0]) != adaptation_identity(plans[1])


@pytest.mark.slow
def test_a_cosine_head_trains_another_body_and_sends_a_factor_in_place_of_biases(tmp_path):
    plans = [plan_of(tmp_path, *STSA, f"adapt.head={head}") for head in ("linear", "cosine")]
    linear, cosine = (prepare_inputs(plan, tmp_path, Here()).adapted for plan in plans)
    assert weights_hash(linear.body) != weights_hash(cosine.body)
    assert linear.trained.keys() == cosine.trained.keys()
    classes = len(plans[0].dealt.stream.tasks[0].columns)
    fewer = [
        row.up_bytes - other.up_bytes for row, other in zip(linear.ledger.uploads, cosine.ledger.uploads, strict=True)
    ]
    assert set(fewer) == {4 * (classes - 1)}


def test_the_head_is_part_of_the_identity(tmp_path):
    old, typed = (plan_of(tmp_path, *STSA, *knobs) for knobs in ((), ("adapt.head=linear",)))
    cosine = plan_of(tmp_path, *STSA, "adapt.head=cosine")
    assert adaptation_identity(old) == adaptation_identity(typed)
    assert adaptation_identity(cosine) == {**adaptation_identity(old), "head": "cosine"}
    runs = [plan.settings.identity()["adapt"] for plan in (old, typed, cosine)]
    assert [run.get("head") for run in runs] == ["linear", "linear", "cosine"]


def test_clients_of_the_first_stage_train_one_after_the_other(tmp_path):
    """They train a network, so that `parallel_clients` is no part of the stage's id."""
    one, other = (plan_of(tmp_path, *STSA, f"parallel_clients={size}") for size in ("1", "3"))
    assert adaptation_identity(one) == adaptation_identity(other)
    assert one.settings.identity() != other.settings.identity()


def test_the_models_of_a_round_of_the_first_stage_count_as_memory(tmp_path):
    plan = plan_of(tmp_path, *STSA, "adapt.training.aggregate=median")
    with pytest.raises(UserError, match=r"^adapt\.training\.aggregate=median needs .* GiB for the models of a round"):
        plan.settings.adapt.check(replace(plan.context, clients=10**9), [4])


@pytest.mark.slow
def test_masks_leave_the_first_stage_as_it_is(tmp_path):
    """Clients sent their models times their samples, and the server weighed them once more."""
    pytest.importorskip("cryptography")
    found = [
        run_in(tmp_path / secure, *STSA, f"secure={secure}").record["adaptation"]["weights"]
        for secure in ("none", "sums")
    ]
    assert found[0] == found[1]


def test_only_labelled_samples_and_present_clients_take_part(tmp_path, trained):
    outcome = run_in(tmp_path, *STSA, "label_rate=0.3", "adapt.training.fraction=0.5", "clients=4")
    uploads = pd.read_csv(outcome.folder / "uploads.csv")
    own = uploads[uploads.stage == "adaptation"]
    assert len(own) == 12
    active = own[own.up_bytes > 0]
    assert active.groupby("round").size().tolist() == [2, 2, 2]
    assert sorted(trained) == sorted(active.labelled)
    assert (active.labelled < active.samples).any()
    assert outcome.record["adaptation"]["up_total_bytes"] == own.up_bytes.sum()


def test_a_rate_of_no_parameter_is_refused(tmp_path):
    told = r"^adapt\.training\.rates\.head\.0=0\.1: no parameter that trains has such a name \(did you mean heads"
    with pytest.raises(UserError, match=told):
        plan_of(tmp_path, *STSA, "+adapt.training.rates={head.0:0.1}")
    plan_of(tmp_path, *STSA, "+adapt.training.rates={heads.0:0.1,body:0.2}")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("adapt=fedavgg", "adapt=fedavgg is not known (did you mean fedavg?"),
        ("adapt.training.rounds=0", "adapt.training.rounds=0 is out of range (an integer from 1 to 1000000)"),
        ("adapt.training.lrr=1", "unknown key adapt.training.lrr"),
        ("adapt.head=linaer", "adapt.head=linaer is not known (did you mean linear or cosine?"),
        ("backbone=pixels", "backbone=pixels has nothing to train"),
        ("method=fedavg", "adapt=fedavg: method=fedavg trains the network itself in every task (adapt=none"),
    ],
)
def test_wrong_knobs_are_one_line_and_exit_code_2(command, tmp_path, typed, told):
    small = (
        *(choice for choice in SMALL if not typed.startswith("backbone=") or not choice.startswith("backbone")),
        typed,
    )
    code, _, err = command(*small, f"out={tmp_path}")
    assert code == 2
    [line] = err.splitlines()
    assert line.startswith("fcl-bench: error: ")
    assert told in line
    assert not list(tmp_path.rglob("adapted-*"))


@pytest.mark.parametrize(
    "knobs", [{"fraction": 0.0}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"epochs": 0}], ids=str
)
def test_other_wrong_knobs_name_the_key(knobs):
    with pytest.raises(UserError, match=rf"adapt\.training\.{next(iter(knobs))}="):
        typed_instance(FedAvgAdaptation, {"training": knobs}, "adapt")


def test_the_defaults_are_stsas_for_a_resnet18_from_scratch(tmp_path):
    """STSA E.2: 100 rounds of 2 epochs, batch 128, lr 0.04 with a cosine, momentum 0.9, weight decay 5e-4."""
    knobs = settings_for(tmp_path, "adapt=fedavg", "backbone=tiny").adapt.training
    found = (knobs.rounds, knobs.epochs, knobs.batch_size, knobs.lr, knobs.schedule, knobs.momentum, knobs.weight_decay)
    assert found == (100, 2, 128, 0.04, "cosine", 0.9, 5e-4)
    assert knobs.weighting == "samples"
