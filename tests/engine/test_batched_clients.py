"""Runs with `parallel_clients`: the results of clients one after the other, to rounding, whatever else a run does."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from fcl_bench.engine import in_process
from fcl_bench.engine.in_process import InProcess, group_size
from fcl_bench.errors import UserError
from fcl_bench.execution.plan import make_plan
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.gradient import batched_heads
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.options.faults.choices import Faulty, ListedFaults
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.secure.party import Parties, simulated
from fcl_bench.options.secure.transport import SummingTransport
from fcl_bench.protocol.fields import Uploads
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import CPU, feature_tasks, federation_of
from tests.methods.whole_runs import assert_resumes, feature_context, learnt, model_of
from tests.small_methods import NAMES, architecture, class_of, trains_by_gradient
from tests.small_runs import interrupted_in, run_in, settings_for

D = 6
FINETUNE = (
    *("method=fedavg", "method.trains=features", "tasks=3", "clients=3", "partition=iid"),
    *("method.training.rounds=2", "method.training.epochs=1"),
)
METHODS = [name for name in NAMES if trains_by_gradient(name) and architecture(name) == "conv"]
#: Whose clients train linear heads by nothing but cross-entropy and a pull in every task; and in the first task alone,
#: where nothing is known yet of earlier ones.
ALWAYS, AT_FIRST = {"fedavg", "feddisco", "feddyn", "fedprox", "moon"}, {"fedewc", "fedgen", "fedicarl", "fedlwf"}
#: One task without any samples of a client, one with a single one.
SIZES = [[20, 13, 9, 40, 11], [17, 0, 30, 1, 8]]
#: Of models in float32 after tasks of 3 rounds.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def tasks_of(sizes=SIZES):
    return feature_tasks(0, [4, 3, 2][: len(sizes)], sizes, D)


def knobs_of(**own) -> Training:
    return Training(**{"rounds": 3, "epochs": 2, "batch_size": 8, "lr": 0.1, "weight_decay": 0.01, **own})


def on_features(name: str, knobs: Training) -> GradientMethod | None:
    """The method with its own defaults, on features; None if it takes none."""
    try:
        return class_of(name)(training=knobs, trains="features", frozen_stages=0)
    except UserError:
        return None


def beside(size: str):
    return lambda *parts: InProcess.of(*parts, parallel=size)


def ended(method, size: str = "1", tasks=None, **options):
    return learnt(method, feature_context(D), tasks or tasks_of(), transport=beside(size), **options)


def assert_same_model(ours, theirs):
    ours, theirs = model_of(ours), model_of(theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **CLOSE)


@pytest.mark.slow_cases(
    "feddisco-0.0",
    "feddyn-0.0",
    "feddyn-0.9",
    "fedewc-0.0",
    "fedgen-0.0",
    "fedgen-0.9",
    "fedicarl-0.0",
    "fedicarl-0.9",
    "fedlwf-0.0",
    "fedlwf-0.9",
    "fedntd-0.0",
    "fedntd-0.9",
    "fedprotip-0.0",
    "fedprotip-0.9",
    "moon-0.9",
    "regmean-0.0",
    "regmean-0.9",
    "scaffold-0.0",
    "scaffold-0.9",
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", [name for name in METHODS if on_features(name, knobs_of())])
def test_every_method_learns_what_it_learns_one_after_the_other(name, momentum):
    method = on_features(name, knobs_of(momentum=momentum))
    single, several = ended(method), ended(method, "3")
    assert_same_model(several, single)
    found = several.state.batched_turns
    reasons = found["single_because"]
    assert bool(found["turns_batched"]) == (name in ALWAYS | AT_FIRST), found
    assert bool(reasons) == (name not in ALWAYS), found
    if name in ALWAYS:
        # Groups of 3 and 2 in the first task, and of 3 and 1 in the second, in which one client has no samples.
        assert found["turns_batched"] == 3 * (5 + 3)
    elif name not in AT_FIRST:
        assert all(torch.equal(value, model_of(single)[key]) for key, value in model_of(several).items())
    assert single.state.batched_turns["turns_batched"] == 0
    assert sum(row.up_bytes for row in single.state.ledger.uploads) == sum(
        row.up_bytes for row in several.state.ledger.uploads
    )


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [({"optimizer": "adam"}, "is not SGD with one rate"), ({"rates": {"heads.0": 0.05}}, "is not SGD with one rate")],
)
def test_knobs_without_a_batched_form_say_so(knobs, reason):
    method = FedAvg(training=knobs_of(**knobs), trains="features")
    several = ended(method, "3")
    found = several.state.batched_turns
    if "rates" in knobs:  # the first task has one head, and so one rate
        assert found["turns_batched"] == 15
    assert [reason in told for told in found["single_because"]] == [True]
    assert_same_model(several, ended(method))


def test_bfloat16_trains_one_after_the_other():
    several = ended(FedAvg(training=knobs_of(precision="bfloat16"), trains="features"), "3")
    assert several.state.batched_turns["single_because"] == ["precision is bfloat16"]


def test_frozen_heads_and_a_loss_classes_the_task():
    method = FedAvg(training=knobs_of(), trains="features", frozen_heads=True, loss_classes="task")
    several = ended(method, "4")
    assert several.state.batched_turns["single_because"] == []
    assert_same_model(several, ended(method))


def test_a_rate_of_all_heads_counts():
    method = FedAvg(training=knobs_of(rates={"heads": 0.3}), trains="features")
    several = ended(method, "4")
    assert several.state.batched_turns["single_because"] == []
    assert_same_model(several, ended(method))


def test_closed_form_methods_are_the_same_bits():
    single, several = ended(AFL()), ended(AFL(), "3")
    assert torch.equal(single.server.model()["W"], several.server.model()["W"])
    assert several.state.batched_turns["single_because"] == ["the method trains no linear heads by SGD"]


def test_groups_end_at_the_size_and_where_features_would_not_fit(monkeypatch):
    groups = []
    train = batched_heads.train_heads

    def counted(start, turns, steps):
        groups.append([len(turn.labels) for turn in turns])
        return train(start, turns, steps)

    monkeypatch.setattr("fcl_bench.methods.gradient.batched_heads.train_heads", counted)
    method = FedAvg(training=knobs_of(rounds=1), trains="features")
    ended(method, "3")
    assert groups == [[20, 13, 9], [40, 11], [17, 30, 1]]
    groups.clear()
    monkeypatch.setattr(in_process, "MOST_NUMBERS", 45 * D)
    # Of the others each is a group of its own, or the last of one that is full.
    ended(method, "9")
    assert groups == [[20, 13, 9], [30, 1, 8]]


def test_seconds_of_a_group_are_dealt_by_samples(monkeypatch):
    class Clock:
        """A joint training takes 8 seconds, and everything else none."""

        seconds = 8.0

        def __init__(self, device):
            self.counts = Counter()

        def running(self):
            return torch.no_grad()

    monkeypatch.setattr(in_process, "Stopwatch", Clock)
    run = ended(FedAvg(training=knobs_of(rounds=1), trains="features"), "5", tasks_of([[20, 13, 9, 40, 11]]))
    seconds = [row.client_seconds for row in run.state.ledger.uploads]
    shares = [8 * n / 93 for n in (20, 13, 9, 40, 11)]
    assert seconds == pytest.approx(shares, abs=0.5)
    assert max(seconds) - min(seconds) > 1.5


def test_clients_that_fail_do_the_same_beside_others():
    faults = ListedFaults(silent=["1@0"], late=["3@0"], gone=["4@1"])
    method = FedAvg(training=knobs_of(), trains="features")

    def failing(size):
        return lambda *parts: Faulty(InProcess.of(*parts, parallel=size), faults, 0)

    single, several = (learnt(method, feature_context(D), tasks_of(), transport=failing(size)) for size in ("1", "4"))
    assert_same_model(several, single)
    assert several.state.absences == single.state.absences
    assert several.state.absences["silent"] == several.state.absences["late"] == 3
    assert several.state.batched_turns["turns_batched"] > 0


def test_secure_sums_add_up_the_same():
    def summing(size):
        def reached(method, context, *parts):
            masks = [Parties(SecureSums(), simulated(0, "a run"), Uploads.of(method, context))]
            inner = InProcess.of(method, context, *parts, middleware=masks, parallel=size)
            return SummingTransport(inner, SecureSums(), 0)

        return reached

    context = dataclasses.replace(feature_context(D), sums=True)
    method = FedAvg(training=knobs_of(), trains="features")
    single, several = (learnt(method, context, tasks_of([[20, 13, 9, 40, 11]]), transport=summing(s)) for s in "14")
    assert_same_model(several, single)
    assert several.state.batched_turns == {"turns_batched": 12, "turns_single": 3, "single_because": []}


@pytest.mark.parametrize("name", ["fedavg", "feddyn"])
def test_a_run_resumes_from_every_round_bit_for_bit(name):
    method = on_features(name, knobs_of(momentum=0.5))
    whole, _ = assert_resumes(
        lambda: federation_of(method, feature_context(D), tasks_of(), transport=beside("3")), step=2
    )
    assert whole.state.batched_turns["turns_batched"] > 0


def test_a_refused_upload_is_taken_back():
    """A client's state is that of before its turn, though its neighbours trained with it."""
    method = on_features("feddyn", knobs_of(rounds=2))
    single, several = (
        federation_of(method, feature_context(D), tasks_of(), transport=beside(size), drops=True) for size in "14"
    )
    for run in (single, several):
        absorb = run.server.objection
        run.server.objection = lambda upload, absorb=absorb: (
            "it is refused" if upload.samples == 9 and upload.stage == "model" else absorb(upload)
        )
        run.run(lambda _: None)
    assert_same_model(several, single)
    assert several.state.ledger.dropped() == single.state.ledger.dropped()
    assert len(several.state.ledger.dropped()) == 2
    theirs = single.transport.state_dict()
    assert several.transport.state_dict().keys() == theirs.keys()
    for key, value in several.transport.state_dict().items():
        torch.testing.assert_close(value, theirs[key], **CLOSE)


@pytest.mark.parametrize("size", ["1", "4"])
def test_a_model_that_is_not_finite_is_one_line(size):
    with pytest.raises(UserError, match=r"method\.training\.lr=1e\+20: training diverged"):
        ended(FedAvg(training=knobs_of(lr=1e20, weight_decay=1e3), trains="features"), size)


# The key --------------------------------------------------------------------------------------------------------------


def test_auto_follows_the_device_alone():
    assert group_size("auto", CPU) == 16
    assert group_size("auto", torch.device("cuda")) == 1
    assert [group_size("7", torch.device(kind)) for kind in ("cpu", "cuda")] == [7, 7]


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "all", "12345"])
def test_other_values_are_one_line(value, tmp_path):
    with pytest.raises(UserError, match=rf"parallel_clients={value} is not known \(auto, or 1 to 9999 clients\)"):
        settings_for(tmp_path, f"parallel_clients={value}")


def test_clients_elsewhere_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"parallel_clients=2: .* transport=ranks has several \(parallel_clients=1"):
        make_plan(settings_for(tmp_path, "parallel_clients=2", "transport=ranks", *FINETUNE))


@pytest.mark.slow
def test_a_run_says_who_trained_together_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    single = run_in(tmp_path / "single", *FINETUNE)
    whole = run_in(tmp_path / "whole", *FINETUNE, "parallel_clients=auto")
    assert single.record["batched_turns"] == {"turns_batched": 0, "turns_single": 18, "single_because": []}
    assert whole.record["batched_turns"] == {"turns_batched": 18, "turns_single": 0, "single_because": []}
    assert single.record["run_id"] != whole.record["run_id"]
    assert single.record["run_id"] == make_plan(settings_for(tmp_path, *FINETUNE, "parallel_clients=1")).id
    assert whole.record["metrics"]["accuracy"] == pytest.approx(single.record["metrics"]["accuracy"], abs=1.0)
    with interrupted_in(2, monkeypatch):
        run_in(tmp_path / "again", *FINETUNE, "parallel_clients=auto")
    again = run_in(tmp_path / "again", *FINETUNE, "parallel_clients=auto")
    for key in ("metrics", "communication", "batched_turns", "privacy"):
        assert again.record[key] == whole.record[key], key
    trained = load_file(whole.folder / "model.safetensors")
    assert all(torch.equal(value, trained[key]) for key, value in load_file(again.folder / "model.safetensors").items())
    for key, value in load_file(single.folder / "model.safetensors").items():
        torch.testing.assert_close(trained[key], value, **CLOSE)
