"""Uploads in any order, at any time: the end is that of synchronous rounds, and every upload counts exactly once."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
from functools import partial

import numpy as np
import pytest
import torch

import fcl_bench
from fcl_bench.cli import runs
from fcl_bench.engine import checkpoint as checkpoints
from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.engine.transport import OPEN_ROUNDS
from fcl_bench.errors import UserError
from fcl_bench.execution import run as running
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.open_rounds import Arrivals, OpenFederation, arrival_order
from tests.methods.harness import context_of
from tests.methods.test_withdrawal import METHODS
from tests.methods.training_harness import feature_tasks, federation_of
from tests.small_runs import run_in, settings_for

#: Four clients, three tasks, in which some clients have nothing; the method of most tests.
TASKS = feature_tasks(5, [3, 2, 2], [[20, 0, 15, 5], [9, 16, 0, 5], [1, 9, 12, 7]])
UPLOADS, NCM = 10, FedNCM()


def begun(method, tasks=TASKS, order=None, transport=InProcess.of, **given):
    kind = partial(OpenFederation, order=order)
    return federation_of(method, context_of(6), tasks, transport=transport, kind=kind, **given)


def ended(federation, **given):
    federation.run(lambda _: None, **given)
    return federation


def synchronous(method, tasks=TASKS, **given):
    return ended(federation_of(method, context_of(6), tasks, **given))


def require_alike(ours, theirs):
    for name, wanted in theirs.server.model().items():
        error = (ours.server.model()[name] - wanted).abs().max()
        assert error <= 1e-9 * max(1.0, float(wanted.abs().max())), (name, error)


def fates(federation):
    """(client, task, fate) of what arrived."""
    _, rows = federation.exchange.tables()["arrivals.csv"]
    return [(client, task, fate) for _, client, task, fate, _ in rows]


@pytest.mark.slow_cases(*(f"own-{name}" for name in METHODS if name != "afl"))
@pytest.mark.parametrize("order", [None, "own"], ids=["any", "own"])
@pytest.mark.parametrize("name", METHODS)
def test_the_end_is_that_of_synchronous_rounds(name, order):
    ours, theirs = ended(begun(METHODS[name], order=order)), synchronous(METHODS[name])
    require_alike(ours, theirs)
    taken = fates(ours)
    assert len(set(taken)) == len(taken) == UPLOADS
    assert [task for _, task, _ in taken] != sorted(task for _, task, _ in taken)
    for way in ("correct", "aware"):
        assert (ours.state.answers[way][-1] == theirs.state.answers[way][-1]).all()
    mine, others = ours.state.ledger, theirs.state.ledger
    assert mine.communication() == others.communication()
    assert [mine.labels(task) for task in range(3)] == [others.labels(task) for task in range(3)]
    assert mine.single_samples() == others.single_samples()


def test_the_end_solves_the_equations():
    """In plain NumPy, over all samples at once: W = (sum H'H + gamma I)^-1 sum H'Y."""
    server = ended(begun(STSA(M=12, gamma=1.0))).server
    Z, labels = (np.concatenate([part[i].numpy() for task in TASKS for part in task]) for i in (0, 1))
    H = np.maximum(Z @ server.model()["projection"].numpy(), 0)
    W = np.linalg.solve(H.T @ H + np.eye(12), H.T @ np.eye(7)[labels])
    assert np.abs(server.model()["W"].numpy() - W).max() < 1e-9


def test_orders_are_all_as_likely_and_own_ones_keep_each_clients_tasks_ascending():
    pairs = np.array([(0, 0), (1, 0), (0, 1), (1, 1)])
    drawn = {order: [arrival_order(pairs, seed, order) for seed in range(600)] for order in (None, "own")}
    for order, all_alike in ((None, 24), ("own", 6)):
        found = {tuple(one): 0 for one in drawn[order]}
        for one in drawn[order]:
            assert sorted(one) == [(0, 0), (0, 1), (1, 0), (1, 1)]
            found[tuple(one)] += 1
        assert len(found) == all_alike
        assert max(found.values()) < 2.2 * 600 / all_alike
    for one in drawn["own"]:
        for client in (0, 1):
            assert [task for who, task in one if who == client] == [0, 1]


class Repeating(InProcess):
    """Sends everything twice: at once, or after all else; `changed`: with other numbers the second time."""

    later, changed = False, False

    def arrivals(self, pending, broadcast):
        sent = []
        for reply in super().arrivals(pending, broadcast):
            yield reply
            if self.changed:
                upload = reply.upload.with_tensors({name: own + 1 for name, own in reply.upload.items()})
                reply = dataclasses.replace(reply, upload=upload)
            sent.append(reply)
            if not self.later and len(sent) < len(pending):
                yield sent[-1]
        if self.later:
            yield from sent


class Changing(Repeating):
    changed = True


class Late(Repeating):
    """The first upload comes once more after each of the others."""

    def arrivals(self, pending, broadcast):
        first = None
        for reply in InProcess.arrivals(self, pending, broadcast):
            yield from [] if first is None else [first]
            first = first or reply
            yield reply


@pytest.mark.parametrize(("transport", "again"), [(Repeating, "repeated"), (Changing, "refused"), (Late, "repeated")])
def test_what_comes_again_counts_once(transport, again, caplog):
    ours, theirs = ended(begun(NCM, transport=transport.of)), ended(begun(NCM))
    assert torch.equal(ours.server.model()["W"], theirs.server.model()["W"])
    taken = fates(ours)
    assert [own for own in taken if own[2] == "absorbed"] == fates(theirs)
    assert [fate for *_, fate in taken].count(again) == UPLOADS - 1 == len(taken) - UPLOADS
    assert ours.exchange.report()["arrivals"][again] == UPLOADS - 1
    assert ours.state.ledger.communication() == theirs.state.ledger.communication()
    assert ours.state.client_counts == theirs.state.client_counts
    assert (sum("only the first counts" in told for told in caplog.messages) > 0) == (again == "refused")


def test_an_upload_that_is_not_as_expected_is_left_out_for_good():
    class Bad(InProcess):
        def arrivals(self, pending, broadcast):
            for reply in super().arrivals(pending, broadcast):
                bad = reply.upload.with_tensors({**reply.upload, "n": -reply.upload["n"]})
                yield dataclasses.replace(reply, upload=bad) if (reply.client, bad.task) == (0, 1) else reply

    with pytest.raises(UserError, match="client 0's upload in task 1"):
        ended(begun(NCM, transport=Bad.of))
    ours = ended(begun(NCM, transport=Bad.of, drops=True))
    others = [list(clients) for clients in TASKS]
    Z, labels = others[1][0]
    others[1][0] = Z[:0], labels[:0]
    n = np.bincount(np.concatenate([labels.numpy() for clients in others for _, labels in clients]), minlength=7)
    assert ours.server.n.tolist() == n.tolist()
    assert (0, 1, "dropped") in fates(ours)
    assert ours.state.ledger.dropped(1) == [(0, 0)]


class Killed(BaseException):
    """What stops a process at any place."""


def killed_at(number, monkeypatch):
    """From here on the process is killed at the number-th of what a checkpoint does to files."""
    count = itertools.count()
    for name in ("save_file", "write_json", "appending", "replacing"):
        original = getattr(checkpoints, name)

        def counted(*given, original=original):
            if next(count) == number:
                raise Killed
            return original(*given)

        monkeypatch.setattr(checkpoints, name, counted)


def resumed(folder):
    checkpoint, federation = Checkpoint(folder, 1), begun(NCM)
    if (found := checkpoint.load()) is not None:
        federation.restore(*found)
    federation.run(lambda done: checkpoint.save(*done.save()), 1)
    return federation


@pytest.mark.slow_cases(*map(str, range(1, 45)))
@pytest.mark.parametrize("number", range(45))
def test_a_kill_between_any_two_writes_changes_nothing(number, tmp_path, monkeypatch):
    """A checkpoint after every upload takes four writes; the process that goes on is killed at the next place."""
    whole = ended(begun(NCM))
    with monkeypatch.context() as patch:
        killed_at(number, patch)
        with contextlib.suppress(Killed):
            resumed(tmp_path)
    ours = resumed(tmp_path)
    assert torch.equal(ours.server.model()["W"], whole.server.model()["W"])
    assert ours.server.n.tolist() == whole.server.n.tolist()
    assert ours.server.uploads == UPLOADS
    assert fates(ours) == fates(whole)
    assert ours.state.ledger.communication() == whole.state.ledger.communication()


def test_a_process_that_is_killed_after_every_upload_ends_like_any_other(tmp_path):
    whole, checkpoint = ended(begun(NCM)), Checkpoint(tmp_path, 1)

    def save_and_die(done):
        checkpoint.save(*done.save())
        raise Killed

    for _ in range(UPLOADS):
        federation = begun(NCM)
        if (found := checkpoint.load()) is not None:
            federation.restore(*found)
        with pytest.raises(Killed):
            federation.run(save_and_die, 1)
    assert torch.equal(federation.server.model()["W"], whole.server.model()["W"])
    assert fates(federation) == fates(whole)
    assert federation.exchange.report() == whole.exchange.report()


def test_a_repeat_is_recognised_by_the_next_process(tmp_path):
    checkpoint, federation = Checkpoint(tmp_path, 1), begun(NCM)

    def stopped(done):
        checkpoint.save(*done.save())
        if len(done.arrivals) == 4:
            raise Killed

    with pytest.raises(Killed):
        federation.run(stopped, 1)
    first = fates(federation)[0][:2]

    class AsksAgain(InProcess):
        def arrivals(self, pending, broadcast):
            assert len(pending) == UPLOADS - 4
            return super().arrivals([first, *pending], broadcast)

    ours = begun(NCM, transport=AsksAgain.of)
    ours.restore(*checkpoint.load())
    ended(ours)
    assert torch.equal(ours.server.model()["W"], ended(begun(NCM)).server.model()["W"])
    assert (*first, "repeated") in fates(ours)


def test_steps_are_equal_parts_of_the_uploads():
    report = ended(begun(NCM)).exchange.report()
    fates_of = {"absorbed": UPLOADS, "dropped": 0, "repeated": 0, "refused": 0}
    assert report == {"arrivals": fates_of, "in_after": [4, 7, 10]}
    assert Arrivals().report()["in_after"] == []


SMALL = ("data=digits", "clients=4", "tasks=3", "logger=none", "method=fedncm")
OPEN = f"transport.rounds={OPEN_ROUNDS}"


@pytest.mark.slow
def test_a_run_says_what_arrived_and_its_files_agree(tmp_path):
    done = run_in(tmp_path, *SMALL, OPEN)
    arrived, in_after = done.record["transport"]["arrivals"], done.record["transport"]["in_after"]
    with (done.folder / "arrivals.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert arrived["absorbed"] == len(rows) == in_after[-1]
    assert {row["fate"] for row in rows} == {"absorbed"}
    runs.work(["verify", str(done.folder)])  # an error, unless all agree
    assert run_in(tmp_path, *SMALL, OPEN).was_complete


@pytest.mark.slow
def test_synchronous_rounds_keep_the_runs_id_and_open_ones_have_their_own(tmp_path):
    usual, given, opened, own = (
        settings_for(tmp_path, *SMALL, *more).identity()
        for more in ((), ("transport.rounds=synchronous",), (OPEN, "transport.every=3"), (OPEN, "transport.order=own"))
    )
    assert usual == given
    assert "transport" not in usual
    assert opened["transport"] == {"rounds": OPEN_ROUNDS}
    assert own["transport"] == {"rounds": OPEN_ROUNDS, "order": "own"}


@pytest.mark.slow
def test_the_folder_has_the_current_model_after_every_upload(tmp_path, monkeypatch):
    """That of a server that has the sums of the uploads so far, in plain NumPy; also in a run that goes on."""
    seen, write = [], running._write_current

    def looked(plan, folder, federation, inputs):
        write(plan, folder, federation, inputs)
        B, n = federation.server.B.numpy(), federation.server.n.numpy()
        means = B / np.maximum(n, 1)
        W = means / np.maximum(np.linalg.norm(means, axis=0), 1e-12)
        scores = fcl_bench.Model(folder.path / "model.safetensors").scores(inputs.test.numpy()[:20])
        Z = inputs.test.numpy()[:20].astype(float)
        wanted = Z / np.linalg.norm(Z, axis=1, keepdims=True) @ W
        np.testing.assert_allclose(scores[:, n > 0], wanted[:, n > 0], atol=1e-9)
        assert not (scores.argmax(1)[:, None] == np.flatnonzero(n == 0)).any()
        seen.append(len(federation.arrivals))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(running, "_write_current", looked)
    given = (*SMALL, OPEN, "transport.every=1")
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path, *given)
    done = run_in(tmp_path, *given)
    whole = done.record["transport"]["arrivals"]["absorbed"]
    assert seen == [1, 2, *range(2, whole + 1)]


COMPOSED = {
    "asynchronous": ("split=asynchronous", "split.groups=3", "method=afl", "method.upload=sums"),
    "recurring": ("split=si_blurry", "method=stsa", "method.M=20"),
    "noise": ("noise=gaussian", "noise.multiplier=0.1", "method=fedlda"),
    "noise without counting": ("noise=gaussian", "noise.multiplier=0", "method=stsa", "method.M=20"),
    "few labels": ("label_rate=0.5", "method=fedncm"),
    "validation": ("data.validation=0.2", "method=fedncm"),
    "dropping": ("on_bad_upload=drop", "method=fedncm"),
    "held columns": ("wire.columns=held", "wire.gram=packed", "method=stsa", "method.M=20"),
    "a matrix": ("wire.projection=matrix", "method=ranpac", "method.M=20"),
}


@pytest.mark.slow_cases(*COMPOSED)
@pytest.mark.parametrize("name", COMPOSED)
def test_it_goes_with(name, tmp_path):
    if "noise.multiplier=0.1" in COMPOSED[name]:
        pytest.importorskip("dp_accounting")
    ours, theirs = (run_in(tmp_path, *SMALL[:4], *COMPOSED[name], rounds) for rounds in (OPEN, "seed=0"))
    W, wanted = (fcl_bench.load(one.folder).model._server.model() for one in (ours, theirs))
    for part, value in wanted.items():
        assert float((W[part] - value).abs().max()) <= 1e-9 * max(1.0, float(value.abs().max())), part
    assert ours.record["metrics"]["A_T"] == theirs.record["metrics"]["A_T"]
    assert ours.record["privacy"] == theirs.record["privacy"]
    runs.work(["verify", str(ours.folder)])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["method=afl"], "the order of uploads matters to method=afl.*method.aggregation=sum method.upload=sums"),
        (["method=fedran"], "the order of uploads matters to method=fedran.*method=stsa"),
        (["method=ds_al"], "uploads depend on those of others.*method=stsa"),
        (["method=stsa_e"], "the order of uploads matters to method=stsa_e.*method=stsa"),
        (["secure=sums"], "with secure=sums the server never has what one client sent.*secure=none"),
        (["dtype=float32"], "sums in dtype=float32 round too much.*dtype=float64"),
        (["faults=random", "faults.silent=0.2"], "faults=random is of rounds with all clients.*faults=none"),
        (["robust_groups=3"], "transport.rounds=open: no round has all uploads.*robust_groups=0"),
        (["drift=5"], "audits look at whole tasks.*drift=0"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_it_does_not_go_with_is_one_line(tmp_path, overrides, told):
    with pytest.raises(UserError, match=told) as error:
        run_in(tmp_path, "data=digits", "clients=4", "tasks=3", *SMALL[4:], *overrides, OPEN)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("runs/*-*"))


def test_keys_of_open_rounds_are_refused_without_them(tmp_path):
    for key in ("order=own", "every=2"):
        with pytest.raises(UserError, match=f"transport.{key}"):
            settings_for(tmp_path, *SMALL, f"transport.{key}")


def test_a_synchronous_federation_is_as_it_was():
    """The steps of a `Federation` have not changed: tasks one after the other, a row for each client."""
    federation = synchronous(NCM)
    assert type(federation) is Federation
    assert [(row.task, row.client) for row in federation.state.ledger.uploads] == [
        (task, client) for task in range(3) for client in range(4)
    ]
    assert json.dumps(federation.exchange.report()) == "{}"
