"""A site that withdraws: the model is that of a run in which it never took part, and nobody can subtract more."""

from __future__ import annotations

import json
import re
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from fcl_bench.cli import runs
from fcl_bench.engine import validation
from fcl_bench.engine.checkpoint import Checkpoint
from fcl_bench.errors import UserError
from fcl_bench.execution import withdrawing
from fcl_bench.flower import node, relay
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.flower.test_sites import SITES, add_nodes, divided
from tests.small_runs import interrupted_in, run_in

GIVEN = ("clients=3", "tasks=2", "beta=1", "logger=none")
SUMS = ("method=afl", "method.upload=sums", "transport.withdrawal=true", "wire.dtype=float64")


class Sites:
    """Three sites and a server, each with a folder and a terminal."""

    def __init__(self, tmp_path, monkeypatch, capsys) -> None:
        self.folder, self._patch, self._printed = tmp_path, monkeypatch, capsys
        self.whole = divided(tmp_path)
        self.link = FakeSuperLink(tmp_path / "nodes")
        add_nodes(self.link, tmp_path)
        monkeypatch.setattr(relay, "require_flower", lambda user: None)

    def given(self, *overrides):
        return (*GIVEN, *SITES, f"data.path={self.folder / 'test.npz'}", *overrides)

    def run(self, *overrides):
        with reached(self.link, self._patch):
            return run_in(self.folder / "server", *self.given(*overrides))

    def begun(self, *overrides):
        """The folder of a run that was interrupted after its first task."""
        with reached(self.link, self._patch), interrupted_in(1, self._patch):
            run_in(self.folder / "server", *self.given(*overrides))
        (folder,) = (self.folder / "server" / "runs").glob("[!.]*")
        return folder

    def at_site(self, client: int, *typed: str) -> tuple[int, str]:
        """`fcl-bench-node ...` at a site; its exit code, and what it prints."""
        self._patch.setattr(sys, "argv", ["fcl-bench-node", *typed, f"out={self.folder / 'nodes' / str(client)}"])
        code = node.main()
        return code, "".join(self._printed.readouterr())

    def leave(self, client: int, folder):
        """The site's command; the folder that it names."""
        code, told = self.at_site(client, "withdraw", f"run={folder.name.rpartition('-')[2]}", f"clients={client}")
        assert code == 0, told
        return told.partition(":")[0]

    def forget(self, folder, sent):
        """The server's command."""
        runs.work(["withdraw", str(folder), str(sent)])
        return self._printed.readouterr().out


@pytest.fixture
def sites(tmp_path, monkeypatch, capsys):
    return Sites(tmp_path, monkeypatch, capsys)


def weights(folder):
    return load_file(folder / "model.safetensors")["W"]


def solution_of(folder, clients):
    """W by the equations in float64, (sum X'X)^-1 sum X'Y over these clients' samples."""
    held = [np.load(folder / f"site-{client}.npz") for client in clients]
    X = np.concatenate([own["x"] for own in held]).astype(np.float64)
    Y = np.eye(4)[np.concatenate([own["column"] for own in held])]
    return np.linalg.solve(X.T @ X, X.T @ Y)


@pytest.mark.slow
def test_the_model_forgets_a_site(sites):
    done = sites.run(*SUMS)
    whole, without = (solution_of(sites.folder, clients) for clients in ((0, 1, 2), (0, 2)))
    assert np.abs(weights(done.folder) - whole).max() < 1e-9
    assert np.abs(whole - without).max() > 1e-3
    sent = sites.leave(1, done.folder)
    assert f"client 1 is not in the model of {done.folder.name} any more" in sites.forget(done.folder, sent)
    assert np.abs(weights(done.folder) - without).max() < 1e-9
    record = json.loads((done.folder / "run.json").read_text())
    (entry,) = record["transport"]["withdrawn"]
    assert (entry["client"], entry["after_task"]) == (1, 1)
    assert [(gate["gate"], gate["task"]) for gate in record["gates"]] == [("withdrawn", 1)]
    assert record["metrics"] == done.record["metrics"]
    # All files still agree with each other, and the run's command finds it as it is now.
    runs.work(["verify", str(done.folder)])
    assert sites.run(*SUMS).was_complete
    assert "withdrawn: client 1" in sites.at_site(1, "audit")[1]
    # Once, at both ends.
    again = sites.at_site(1, "withdraw", f"run={record['run_id']}", "clients=1")
    assert again[0] == 2
    assert "client 1 has withdrawn from run" in again[1]
    with pytest.raises(UserError, match=r"nothing of .* is in the sums of run .*who was taken out already"):
        sites.forget(done.folder, sent)
    sites.forget(done.folder, sites.leave(0, done.folder))
    assert np.abs(weights(done.folder) - solution_of(sites.folder, (2,))).max() < 1e-9
    with pytest.raises(UserError, match="nobody else is in run"):
        sites.forget(done.folder, sites.leave(2, done.folder))


@pytest.mark.slow
def test_a_run_goes_on_without_the_site(sites):
    folder = sites.begun(*SUMS)
    sent = sites.leave(1, folder)
    sites.forget(folder, sent)
    sites.link.log.clear()
    done = sites.run(*SUMS)
    assert done.folder == folder
    assert [node for node, kind in sites.link.log if kind == "turn"] == ["node-1", "node-3"]
    assert np.abs(weights(folder) - solution_of(sites.folder, (0, 2))).max() < 1e-9
    assert [entry["client"] for entry in done.record["transport"]["withdrawn"]] == [1]
    with pytest.raises(UserError, match="who was taken out already"):
        sites.forget(folder, sent)


@pytest.mark.slow
def test_an_upload_that_was_left_out_is_not_subtracted(sites, monkeypatch):
    checked = validation.validate_upload

    def dropping(arrival, *rest):
        if (arrival.client, arrival.upload.task) == (1, 0):
            raise validation.BadUpload(1, arrival.upload, "it is odd", "another one")
        return checked(arrival, *rest)

    monkeypatch.setattr(validation, "validate_upload", dropping)
    done = sites.run(*SUMS, "on_bad_upload=drop")
    assert done.record["dropped"]["uploads"] == 1
    assert np.abs(weights(done.folder) - solution_of(sites.folder, (0, 1, 2))).max() > 1e-3
    sites.forget(done.folder, sites.leave(1, done.folder))
    assert np.abs(weights(done.folder) - solution_of(sites.folder, (0, 2))).max() < 1e-9


@pytest.mark.slow
def test_a_site_that_has_withdrawn_sends_no_more(sites):
    sites.leave(1, sites.begun(*SUMS))
    with pytest.raises(UserError, match="error 16: it has withdrawn from this run"):
        sites.run(*SUMS)


@pytest.mark.slow
def test_a_withdrawal_that_was_interrupted_is_done_by_the_same_command(sites, monkeypatch):
    done = sites.run(*SUMS)
    sent = sites.leave(1, done.folder)

    def killed(*_):
        raise KeyboardInterrupt

    for owner, name in ((withdrawing, "write_json"), (Checkpoint, "save")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, killed)
            with pytest.raises(KeyboardInterrupt):
                sites.forget(done.folder, sent)
    sites.forget(done.folder, sent)
    assert np.abs(weights(done.folder) - solution_of(sites.folder, (0, 2))).max() < 1e-9
    assert len(json.loads((done.folder / "run.json").read_text())["transport"]["withdrawn"]) == 1
    runs.work(["verify", str(done.folder)])


def other_bytes(sent):
    file = min(sent.iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")


HARMS = {
    "an upload of another size": other_bytes,
    "an upload less": lambda sent: min(sent.iterdir()).unlink(),
    "a folder in its place": lambda sent: (min(sent.iterdir()).unlink(), (sent / "more").mkdir()),
}


@pytest.mark.slow
def test_only_what_a_site_sent_is_subtracted(sites, tmp_path):
    done = sites.run(*SUMS)
    sent, before = sites.leave(1, done.folder), (done.folder / "model.safetensors").read_bytes()
    for name, harm in HARMS.items():
        copy = tmp_path / name
        shutil.copytree(sent, copy)
        harm(copy)
        with pytest.raises(UserError, match="is missing, or not what client 1 sent in task"):
            sites.forget(done.folder, copy)
    for nothing in (tmp_path, tmp_path / "none", tmp_path / "test.npz", done.folder):
        with pytest.raises(UserError, match=f"nothing of {re.escape(str(nothing))} is in the sums of run"):
            sites.forget(done.folder, nothing)
    assert (done.folder / "model.safetensors").read_bytes() == before
