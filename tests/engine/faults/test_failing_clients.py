"""Runs in which clients are silent, late or gone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.centralised_ridge import CentralisedRidge
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedfecam import FedFeCAM
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.gaussian_sketch import GaussianSketch
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.methods.closed_form.stsa_e import STSAE
from fcl_bench.options.faults.choices import Faults, Faulty, ListedFaults, RandomFaults
from fcl_bench.protocol.method import Method
from fcl_bench.training.knobs import Training
from tests.conformance.cases import EVERY, federation_for, method_of
from tests.methods.glfc_harness import quickly, short_descent  # noqa: F401  # a fixture
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import same
from tests.small_methods import architecture
from tests.small_runs import run_in

SIZES = [[12, 9, 8, 10], [10, 11, 9, 12], [9, 9, 11, 8], [6, 7, 9, 9]]


def failing(method: Method, faults: Faults | None, seed: int = 0) -> Federation:
    """The engine before its first task, with 4 clients over 4 tasks."""

    def reached(*parts):
        inner = InProcess.of(*parts)
        return inner if faults is None else Faulty(inner, faults, seed)

    if method.trains_network:
        kind = architecture(method.name)
        context, tasks = tiny_context(architecture=kind), image_tasks(np.random.default_rng(0), [2, 2, 2, 2], SIZES)
    else:
        context, tasks = context_of(6), feature_tasks(0, [2, 2, 2, 2], SIZES)
    return federation_of(method, context, tasks, transport=reached)


def ended(
    method: Method, faults: Faults | None, seed: int = 0, after: Callable[[Federation], object] = id
) -> Federation:
    """The engine after its last task; `after` looks at it after each."""
    federation = failing(method, faults, seed)
    federation.run(after)
    return federation


def with_first_sums(method: Method, faults: Faults | None) -> tuple[Federation, torch.Tensor]:
    """The engine after its last task, and the class sums after the first; what has no faults is made once."""
    if faults is None and id(method) in WITHOUT:
        return WITHOUT[id(method)]
    sums: list[torch.Tensor] = []
    run = ended(method, faults, after=lambda run: sums.append(run.server.B.clone()))
    return WITHOUT.setdefault(id(method), (run, sums[0])) if faults is None else (run, sums[0])


#: By the `id` of the methods below, which live as long.
WITHOUT: dict[int, tuple[Federation, torch.Tensor]] = {}

# Late uploads of the closed-form methods ------------------------------------------------------------------------------

#: Those in whose sums an upload has a place whenever it comes.
ADDITIVE = {
    "afl": AFL(),
    "afl of random features": AFL(M=10),
    "afcl": AFCL(),
    "stsa": STSA(M=10),
    "stsa, ridge by gcv": STSA(M=10, gamma="gcv"),
    "stsa_e": STSAE(M=10, dummy_clients=3),
    "stsa_e, many groups": STSAE(M=3, dummy_clients=12),
    "stsa_e unbiased": STSAE(M=10, dummy_clients=3, estimator="unbiased"),
    "centralised_ridge": CentralisedRidge(M=10),
    "centred_sketch": CentredSketch(M=10, rank=3),
    "fedran, all directions": FedRAN(M=10, rank=10),
    "fedncm": FedNCM(),
    "fedlda": FedLDA(),
    "fedklda": FedKLDA(M=10, bandwidth=1.0),
    "fedfecam": FedFeCAM(M=10),
    "ranpac": RanPAC(M=10, ridge="held_out"),
}
#: Of all tasks but the last, whose late uploads never arrive; the last task has no fault.
LATE = ListedFaults(late=["1@0", "3@0", "0@1", "2@2"])
#: The same, two tasks later where that is before the end.
LATER = ListedFaults(late=["1@0", "3@0", "0@1"], late_by=2, late_unit="task")


@pytest.mark.parametrize("faults", [LATE, LATER], ids=["a round later", "two tasks later"])
@pytest.mark.parametrize("method", ADDITIVE.values(), ids=ADDITIVE.keys())
def test_late_uploads_end_at_the_classifier_of_those_in_time(method, faults):
    if method.name == "afcl":
        faults = ListedFaults(late=[f"{entry}.1" for entry in faults.late], late_by=faults.late_by, late_unit="task")
    late, missing = with_first_sums(method, faults)
    in_time, complete = with_first_sums(method, None)
    count = len(faults.late)
    arrived = {"late": count, "late_arrived": count, "late_absorbed": count}
    assert late.state.absences == {"silent": 0, "gone": 0, "lost": 0, "late_dropped": 0, **arrived}
    rows = {f"{row.client}@{row.task}" for row in late.state.ledger.uploads if row.late}
    assert rows == {entry.removesuffix(".1") for entry in faults.late}
    scale = in_time.server.W.abs().max()
    assert (late.server.W - in_time.server.W).abs().max() <= 1e-9 * scale
    # While they were on their way, their class sums were missing.
    assert not torch.allclose(missing, complete)


def test_a_sketch_of_few_directions_has_exact_class_sums_and_a_gram_within_its_bound():
    """FedRAN's merge is another one: what it dropped, on either way, bounds the difference."""
    method = FedRAN(M=10, rank=4)
    late, in_time = ended(method, LATE), ended(method, None)
    torch.testing.assert_close(late.server.B, in_time.server.B, rtol=1e-12, atol=1e-12)
    apart = torch.linalg.matrix_norm(late.server.gram() - in_time.server.gram(), ord=2)
    assert 1e-9 < apart <= late.server.losses.first + in_time.server.losses.first


@pytest.mark.parametrize(
    "method",
    [
        GaussianSketch(M=10, rank=3, class_rank=2),
        DSAL(M=10),
        AIR(M=10),
        RanPAC(M=10, ridge="held_out", scope="task"),
    ],
    ids=lambda method: method.name,
)
def test_what_has_no_place_in_a_sum_is_left_out_and_counted(method, caplog):
    caplog.set_level("INFO")
    late, silent = ended(method, LATE), ended(method, ListedFaults(silent=LATE.late))
    count = len(LATE.late)
    if late.server.rounds(late.stream.tasks[0]) == 1:
        assert late.state.absences["late_arrived"] == late.state.absences["late"] == count
    assert late.state.absences["late_absorbed"] == 0
    assert torch.equal(late.server.W, silent.server.W)
    assert caplog.text.count("late uploads are of no use to this method") == 1


def test_a_late_bandwidth_is_left_out_since_the_statistics_are_made_with_another():
    late, silent = (ended(FedKLDA(M=10), ListedFaults(**{kind: ["1@0.0"]})) for kind in ("late", "silent"))
    assert (late.state.absences["late_arrived"], late.state.absences["late_absorbed"]) == (1, 0)
    assert late.server.bandwidth == silent.server.bandwidth
    assert torch.equal(late.server.W, silent.server.W)


class Spoilt(Faulty):
    """Late uploads arrive with a NaN."""

    def exchange(self, present, broadcast):
        for answer in super().exchange(present, broadcast):
            if isinstance(answer, Reply) and answer.upload.task != broadcast.task:
                bad = {
                    name: value.clone().fill_(torch.nan) if name == "C" else value
                    for name, value in answer.upload.items()
                }
                yield replace(answer, upload=answer.upload.with_tensors(bad))
            else:
                yield answer


def test_a_bad_late_upload_is_dropped_counted_and_no_longer_waited_for():
    method, faults = STSAE(M=10, dummy_clients=3), ListedFaults(late=["1@0", "3@0"])
    tasks = feature_tasks(0, [2, 2, 2, 2], SIZES)
    spoilt = federation_of(
        method, context_of(6), tasks, transport=lambda *parts: Spoilt(InProcess.of(*parts), faults, 0), drops=True
    )
    spoilt.run(lambda _: None)
    silent = ended(method, ListedFaults(silent=faults.late))
    assert (spoilt.state.absences["late_arrived"], spoilt.state.absences["late_dropped"]) == (2, 2)
    assert torch.equal(spoilt.server.W, silent.server.W)
    assert not any(name.startswith("awaited") for name in spoilt.server.state_dict())


# Silent clients -------------------------------------------------------------------------------------------------------


def test_a_silent_client_is_as_one_without_samples():
    method, sizes = STSA(M=10), [list(row) for row in SIZES]
    tasks = feature_tasks(0, [2, 2, 2, 2], SIZES)
    silent = federation_of(
        method, context_of(6), tasks, transport=lambda *parts: Faulty(InProcess.of(*parts), LISTED, 0)
    )
    silent.run(lambda _: None)
    for entry in LISTED.silent:
        client, task = map(int, entry.split("@"))
        tasks[task][client] = tuple(part[:0] for part in tasks[task][client])
    without = federation_of(method, context_of(6), tasks)
    without.run(lambda _: None)
    assert torch.equal(silent.server.W, without.server.W)
    assert silent.state.absences["silent"] == len(LISTED.silent)
    rows = {(row.task, row.client): row for row in silent.state.ledger.uploads}
    for entry in LISTED.silent:
        client, task = map(int, entry.split("@"))
        row = rows[task, client]
        assert (row.up_bytes, row.down_bytes, row.client_seconds) == (0, 0, 0)
        assert row.samples == sizes[task][client]


LISTED = ListedFaults(silent=["1@0", "3@1", "0@1"])


@pytest.mark.slow_cases("1@0.2", "1@0.3")
@pytest.mark.parametrize("missed", ["1@0.2", "1@0.3"])
def test_a_client_that_missed_the_moments_still_chooses_its_exemplars(missed, tmp_path):
    """Nothing that comes later builds on either, and the client was left out for the rest of the task."""
    trained = ("method=fedicarl", "method.classify=softmax", "method.trains=features", "method.ccvr=gaussian")
    small = ("method.training.rounds=2", "backbone=pixels", "data=digits", "tasks=2", "clients=3", "beta=100")
    out = run_in(tmp_path, *trained, *small, "faults=listed", f"faults.silent=[{missed}]")
    uploads = pd.read_csv(out.folder / "uploads.csv")
    own = uploads[(uploads["client"] == 1) & (uploads["task"] == 0)]
    assert own["stage"].tolist() == ["model", "model", "moments", "exemplars"]
    assert own[own["lost"] == 1]["round"].tolist() == [int(missed[-1])]
    assert (own[own["lost"] == 0]["down_bytes"] > 0).all()


def test_a_late_upload_is_paid_for_when_it_is_sent():
    late, in_time = ended(STSA(M=10), LATE), ended(STSA(M=10), None)
    for there, here in zip(late.state.ledger.uploads, in_time.state.ledger.uploads, strict=True):
        assert (there.task, there.client, there.up_bytes, there.down_bytes) == (
            *(here.task, here.client, here.up_bytes, here.down_bytes),
        )


def test_silent_clients_are_asked_again_until_enough_answer():
    faults = RandomFaults(silent=0.8, min_clients=3)
    run = ended(STSA(M=10), faults)
    answers = [sum(row.up_bytes > 0 for row in run.state.ledger.uploads if row.task == t) for t in range(4)]
    assert all(count >= 3 for count in answers)
    assert run.state.absences["silent"] == 16 - sum(answers)


def test_too_few_answers_end_the_run_in_a_line():
    with pytest.raises(UserError, match=r"0 of 4 clients answer in task 2, round 0, and it takes 1"):
        ended(STSA(M=10), ListedFaults(silent=[f"{k}@2" for k in range(4)]))


def test_a_round_that_asks_one_client_of_several_may_go_without_an_answer():
    """As one of FedProTIP's bases, or of a model with a small fraction: the other clients have rounds of their own."""
    knobs = Training(rounds=3, epochs=1, batch_size=8, augment="none", fraction=0.25)
    run = ended(FedAvg(training=knobs), ListedFaults(silent=[f"{k}@1.1" for k in range(4)]))
    rows = [row for row in run.state.ledger.uploads if row.task == 1]
    assert [sum(row.up_bytes > 0 for row in rows if row.round == round_) for round_ in range(3)] == [1, 0, 1]
    assert run.state.absences["silent"] == 1


def test_the_only_client_with_samples_of_a_task_still_has_to_answer():
    tasks = feature_tasks(0, [2, 2], [[9, 8, 10], [0, 11, 0]])
    faults = ListedFaults(silent=["1@1"])
    made = federation_of(
        STSA(M=10), context_of(6), tasks, transport=lambda *parts: Faulty(InProcess.of(*parts), faults, 0)
    )
    with pytest.raises(UserError, match=r"0 of 1 clients answer in task 1, round 0, and it takes 1"):
        made.run(lambda _: None)


def test_a_task_without_an_answer_is_a_task_without_samples():
    run = ended(STSA(M=10), ListedFaults(silent=[f"{k}@2" for k in range(4)], min_clients=0))
    assert not run.server.W[:, 4:6].any()
    assert run.server.W[:, 6:].any()


# Every method ---------------------------------------------------------------------------------------------------------

#: Rounds without an answer included.
MIXED = RandomFaults(silent=0.25, late=0.25, gone=0.05, min_clients=0)
#: Of whose rounds each takes a tenth of a second: they have one.
DEAR = ("coda_prompt", "cprompt", "dualprompt", "glfc", "lga", "lorm", "pilora", "target")


def unlucky(name: str) -> Federation:
    """A run of two tasks before its first one, in which a client is silent, late and gone."""
    method = method_of(name)
    if name in DEAR:
        method = replace(method, training=replace(method.training, rounds=1))
    return federation_for(method, transport=lambda *parts: Faulty(InProcess.of(*parts), MIXED, 1))


@pytest.mark.parametrize("name", EVERY)
@quickly
def test_every_method_survives(name):
    whole = unlucky(name)
    whole.run(lambda _: None)
    assert whole.state.absences["silent"] + whole.state.absences["late"] > 0
    for tensor in whole.server.model().values():
        assert not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("name", ["afcl", "fedran", "stsa_e", "fedavg", "feddyn", "fedcbc", "fedprotip"])
def test_runs_with_faults_resume_bit_for_bit(name):
    """Kinds of state; that of each method: conformance/test_resume.py."""
    saved: list = []
    whole = unlucky(name)
    whole.run(lambda run: saved.append(copy.deepcopy(run.save())), every=1)
    absent = whole.state.absences
    resumed = unlucky(name)
    resumed.restore(*copy.deepcopy(saved[len(saved) // 2]))
    resumed.run(lambda _: None)
    kept = [{name: value.nan_to_num() for name, value in run.server.state_dict().items()} for run in (whole, resumed)]
    assert same(*kept)  # a ridge that was chosen without samples has no error
    assert same(resumed.transport.state_dict(), whole.transport.state_dict())
    assert resumed.state.absences == absent
    rows = [[replace(row, client_seconds=0.0) for row in run.state.ledger.uploads] for run in (whole, resumed)]
    assert rows[0] == rows[1]
    assert resumed.state.ledger.single_samples() == whole.state.ledger.single_samples()
