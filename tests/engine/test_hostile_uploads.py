"""Hostile uploads, method by method: each is refused in one line, or is what an honest client might have sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.validation import BadUpload
from fcl_bench.errors import UserError
from fcl_bench.linalg.structure import EXACT
from fcl_bench.protocol.context import WIRE_DTYPES
from fcl_bench.protocol.message import Message
from tests.conformance.cases import FAST, federation_for, method_of
from tests.engine.hostile import CLIENT, TASK, sending, tried
from tests.methods.training_harness import tiny_context
from tests.methods.whole_runs import assert_resumes
from tests.small_methods import architecture
from tests.small_runs import run_in

# What the server did before is what it does now -----------------------------------------------------------------------


@pytest.mark.slow_cases("fedprotip", "scaffold")
@pytest.mark.parametrize("name", ["stsa", "afcl", "fedprotip", "scaffold"])
def test_an_honest_run_beside_which_they_were_refused_is_the_honest_run(name):
    beside, alone = federation_for(method_of(name)), federation_for(method_of(name))
    tried(beside)
    alone.run(lambda _: None)
    assert_same_end(beside, alone)


@pytest.mark.parametrize("strangers", [False, True])
def test_of_strangers_a_gram_matrix_is_one_for_certain(strangers, monkeypatch):
    """What a cheap look at a large matrix misses is refused where others than the server's user made it."""
    monkeypatch.setattr(InProcess, "strangers", strangers)
    small = method_of("stsa")
    federation = federation_for(dataclasses.replace(small, M=EXACT + 60))

    def harmed(upload: Message) -> Message:
        """Two features are a little more alike than samples make them: no entry is negative, nor too large."""
        G = upload["G"].double()
        i, j = divmod(int((G - torch.diag(G.diagonal())).argmax()), len(G))
        v = torch.zeros(len(G), 1, dtype=G.dtype)
        v[i], v[j] = 0.5**0.5, -(0.5**0.5)
        G -= (1e-2 * float(G.trace()) / len(G)) * (v @ v.T)
        return upload.with_tensors({**upload, "G": G.to(upload["G"].dtype)})

    sending(federation.transport, "statistics", 0, harmed)
    if strangers:
        with pytest.raises(BadUpload, match="client 1's upload in task 1, round 0 .*: G has an eigenvalue of -"):
            federation.run(lambda _: None)
    else:
        federation.run(lambda _: None)


def not_a_number(upload: Message) -> Message:
    """Every real number is none; of what has none, every count is below 0."""
    broken = {
        name: torch.full_like(value, torch.nan) if value.is_floating_point() else -value.abs() - 1
        for name, value in upload.items()
    }
    return dataclasses.replace(upload, tensors=broken, samples=None if upload.samples is None else 0)


def assert_same_end(a: Federation, b: Federation) -> None:
    for state, other in (
        (a.server.state_dict(), b.server.state_dict()),
        (a.transport.state_dict(), b.transport.state_dict()),
    ):
        assert state.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in state.items())
    assert (a.state.answers["correct"] == b.state.answers["correct"]).all()


# Left out -------------------------------------------------------------------------------------------------------------


#: Method, knobs, the stage and round in which the upload is bad, and the rounds in which the client is then left out.
LEFT_OUT: dict[str, tuple[str, dict[str, Any], str, int, set[int]]] = {
    "closed form": ("stsa", {}, "statistics", 0, {0}),
    "closed form, local solutions": ("afl", {}, "statistics", 0, {0}),
    "sequential merge": ("fedran", {}, "statistics", 0, {0}),
    "sums of everything": ("air", {"M": 8, "correction": "logits"}, "statistics", 0, {0}),
    "counts, then weighted sums": ("air", {}, "counts", 0, {0, 1}),
    "registration, then statistics": ("afcl", {}, "registration", 0, {0, 1}),
    "statistics after a registration": ("afcl", {}, "statistics", 1, {1}),
    "two streams": ("ds_al", {}, "statistics", 0, {0, 1}),
    "gradient": ("fedavg", {}, "model", 0, {0}),
    "gradient, the last round": ("fedavg", {}, "model", 1, {1}),
    "what clients keep": ("scaffold", {}, "model", 0, {0}),
    "sketches that are summed": ("fot", {}, "bases", 2, {2}),
    "bases, then references": ("fedprotip", {}, "bases", 2, {2, 3}),
    "references": ("fedprotip", {}, "references", 3, {3}),
    "a model before bases": ("fedprotip", {}, "model", 1, {1}),
    "squared gradients": ("fedewc", {}, "fisher", 2, {2}),
    "autoencoders": ("fedcbc", {}, "model", 0, {0}),
    "heads that teach": ("fedgen", {}, "counts", 0, {0, 1, 2}),
}


def without(run: Federation, rounds: set[int]) -> Federation:
    """The client is not there in these rounds of the task, as if it had been busy."""
    participants = run.server.participants

    def absent(task, round_, available):
        gone = {CLIENT} if task.index == TASK and round_ in rounds else set()
        return [k for k in participants(task, round_, [k for k in available if k not in gone]) if k not in gone]

    run.server.participants = absent
    return run


@pytest.mark.slow_cases(
    "a model before bases",
    "autoencoders",
    "bases, then references",
    "gradient",
    "gradient, the last round",
    "heads that teach",
    "references",
    "sketches that are summed",
    "squared gradients",
    "what clients keep",
)
@pytest.mark.parametrize(("name", "knobs", "stage", "round_", "rounds"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_a_dropped_client_is_as_one_that_was_not_there(name, knobs, stage, round_, rounds, caplog):
    dropping = federation_for(method_of(name, **knobs), drops=True)
    sending(dropping.transport, stage, round_, not_a_number)
    absent = without(federation_for(method_of(name, **knobs)), rounds)
    for run in (dropping, absent):
        run.run(lambda _: None)
    assert_same_end(dropping, absent)
    assert dropping.state.client_storage_bytes == absent.state.client_storage_bytes
    assert dropping.state.ledger.dropped() == [(CLIENT, round_)]
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"client {CLIENT}'s upload in task {TASK}, round {round_} ({stage}): ")
    # Its upload came all the same: bytes and seconds are counted, and nothing that it guessed.
    [row] = [row for row in dropping.state.ledger.uploads if row.dropped]
    assert (row.task, row.client, row.stage) == (TASK, CLIENT, stage)
    assert row.down_bytes > 0 or stage == "registration"
    assert row.client_seconds > 0
    later = [row for row in dropping.state.ledger.uploads if (row.task, row.client) == (TASK, CLIENT)]
    assert {row.round for row in later if row.client_seconds == 0} == rounds - {round_}


def test_it_is_told_once_however_often_a_client_is_left_out(caplog):
    run = federation_for(method_of("fedavg"), drops=True)
    for round_ in (0, 1):
        sending(run.transport, "model", round_, not_a_number)
    run.run(lambda _: None)
    assert run.state.ledger.dropped() == [(CLIENT, 0), (CLIENT, 1)]
    assert sum("left out" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow_cases("fedgen-counts", "scaffold-model")
@pytest.mark.parametrize(("name", "stage"), [("feddisco", "counts"), ("fedgen", "counts"), ("scaffold", "model")])
def test_a_run_that_was_interrupted_remembers_who_is_left_out(name, stage):
    def made_anew() -> Federation:
        run = federation_for(method_of(name), drops=True)
        sending(run.transport, stage, 0, not_a_number)
        return run

    whole, _ = assert_resumes(made_anew)
    assert whole.state.ledger.dropped() == [(CLIENT, 0)]


@pytest.mark.parametrize("name", ["stsa", "afcl", "fedavg", "fedprotip", "fedcbc", "fedlda"])
def test_a_round_in_which_everyone_is_left_out_changes_nothing_and_the_run_goes_on(name):
    run = federation_for(method_of(name), drops=True)
    exchange = run.transport.exchange

    def all_bad(present, broadcast):
        for reply in exchange(present, broadcast):
            bad = broadcast.task == TASK
            yield dataclasses.replace(reply, upload=not_a_number(reply.upload)) if bad else reply

    run.transport.exchange = all_bad
    assert run.run(lambda _: None).tasks_done == 2
    assert {client for client, _ in run.state.ledger.dropped()} == {0, 1}
    model = [value for value in run.server.model().values() if value.is_floating_point()]
    assert all(bool(torch.isfinite(value).all()) for value in model)


# Whole runs -----------------------------------------------------------------------------------------------------------

RUN = ("method=stsa", "method.M=64", "tasks=2", "clients=3")


@pytest.fixture
def hostile_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the one client is hostile in every run from now on."""
    exchange = InProcess.exchange

    def switched(on: bool) -> None:
        def hostile(self, present, broadcast):
            for reply in exchange(self, present, broadcast):
                bad = on and (broadcast.task, reply.client) == (TASK, CLIENT)
                yield dataclasses.replace(reply, upload=not_a_number(reply.upload)) if bad else reply

        monkeypatch.setattr(InProcess, "exchange", hostile)

    return switched


@pytest.mark.slow
def test_with_fail_the_run_ends_in_one_line_and_can_be_gone_on_with(tmp_path, hostile_runs):
    honest = run_in(tmp_path / "honest", *RUN).record
    hostile_runs(True)
    with pytest.raises(UserError, match=r"^client 1's upload in task 1, round 0 \(statistics\): G is not finite"):
        run_in(tmp_path / "run", *RUN)
    assert not list(tmp_path.glob("run/runs/*/run.json"))
    assert list(tmp_path.glob("run/runs/*/checkpoint/state.json"))
    hostile_runs(False)
    after = run_in(tmp_path / "run", *RUN).record
    assert (after["run_id"], after["metrics"]) == (honest["run_id"], honest["metrics"])
    assert after["dropped"] == {"uploads": 0, "clients": []}


def test_with_drop_the_record_counts_it_and_the_id_is_another(tmp_path, hostile_runs):
    honest = run_in(tmp_path, *RUN)
    hostile_runs(True)
    outcome = run_in(tmp_path, *RUN, "on_bad_upload=drop")
    assert outcome.record["run_id"] != honest.record["run_id"]
    assert outcome.record["dropped"] == {"uploads": 1, "clients": [CLIENT]}
    header, *rows = (outcome.folder / "uploads.csv").read_text().splitlines()
    place = header.split(",").index("dropped")
    assert [row.split(",")[0:3:2] for row in rows if row.split(",")[place] == "1"] == [[str(TASK), str(CLIENT)]]
    # Of the first task nothing differs, and of the second the client's samples are missed.
    assert outcome.record["metrics"]["accuracy"][0] == honest.record["metrics"]["accuracy"][0]
    assert "left out of the round" in (outcome.folder / "run.log").read_text()


# Hostile models -------------------------------------------------------------------------------------------------------

TRAINED = (
    *("method=fedavg", "method.trains=features", "tasks=1", "clients=7", "beta=100", "partition.min_size=0"),
    *("method.training.rounds=5", "method.training.lr=0.5", "method.training.epochs=2"),
)


def scaled(by: float) -> Callable[[Message], Message]:
    return lambda upload: upload.with_tensors({name: value * by for name, value in upload.items()})


@pytest.mark.slow_cases("turned round, a million times as large", "turned round, larger")
@pytest.mark.parametrize("by", [-1e6, -20.0], ids=["turned round, a million times as large", "turned round, larger"])
def test_a_hostile_model_spoils_the_mean_and_no_robust_aggregate(tmp_path, monkeypatch, by):
    def accuracy(aggregate: str, change: Callable[[Message], Message] | None = None) -> float:
        exchange = InProcess.exchange

        def hostile(self, present, broadcast):
            for reply in exchange(self, present, broadcast):
                # In the last round: what follows from it is clients that start from the spoilt model.
                bad = change is not None and (broadcast.round, reply.client) == (4, CLIENT)
                yield dataclasses.replace(reply, upload=change(reply.upload)) if bad else reply

        with monkeypatch.context() as patch:
            patch.setattr(InProcess, "exchange", hostile)
            knobs = [f"method.training.aggregate={aggregate}", "force=true"]
            knobs += ["method.training.trimmed=0.2"] * (aggregate == "trimmed_mean")
            return run_in(tmp_path, *TRAINED, *knobs).record["metrics"]["A_T"]

    honest = accuracy("mean")
    assert honest > 80
    assert accuracy("mean", scaled(by)) < honest - 20
    for aggregate in ("median", "trimmed_mean", "krum"):
        assert accuracy(aggregate, scaled(by)) > honest - 8


def test_a_method_whose_server_sees_more_than_models_takes_the_mean_only():
    for name in ("scaffold", "feddyn", "feddisco", "fedspace", "regmean", "lorm", "pilora"):
        method = method_of(name, training=dataclasses.replace(FAST, aggregate="median"))
        context = tiny_context(architecture=architecture(name))
        with pytest.raises(
            UserError, match=r"^method\.training\.aggregate=median: .* \(method\.training\.aggregate=mean\)$"
        ):
            method.check(context, [3, 3])


def test_the_models_of_a_round_count_as_memory():
    method = method_of("fedavg", training=dataclasses.replace(FAST, aggregate="median"))
    context = dataclasses.replace(tiny_context(), clients=10**9)
    with pytest.raises(UserError, match=r"^method\.training\.aggregate=median needs .* GiB for the models of a round"):
        method.check(context, [3, 3])
    method.check(dataclasses.replace(context, clients=10), [3, 3])


@pytest.mark.parametrize(
    ("aggregate", "told"),
    [
        (
            "krum",
            "method.training.byzantine=1: a round had 3 models, and Krum withstands so many hostile ones only among 5"
            " or more",
        ),
        # 0.1 of 3 models are none, and the trimmed mean is the mean.
        (
            "trimmed_mean",
            "method.training.trimmed=0.1: a round had 3 models, of which this share is none, so that a single hostile"
            " one counts in the mean",
        ),
    ],
)
def test_a_round_too_small_for_an_aggregate_is_told_once(aggregate, told, caplog):
    federation_for(method_of("fedavg", training=dataclasses.replace(FAST, aggregate=aggregate))).run(lambda _: None)
    assert [record.getMessage() for record in caplog.records] == [told]


def test_what_is_refused_knows_its_client():
    run = federation_for(method_of("stsa"))
    sending(run.transport, "statistics", 0, not_a_number)
    with pytest.raises(BadUpload) as told:
        run.run(lambda _: None)
    assert told.value.client == CLIENT
    assert WIRE_DTYPES["float32"] is run.context.wire.dtype
