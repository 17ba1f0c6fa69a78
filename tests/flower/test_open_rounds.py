"""Open rounds over nodes: nobody waits for a slow one, and no upload counts twice, whatever is started again."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest

from fcl_bench.engine import blob
from fcl_bench.errors import UserError
from fcl_bench.execution import run as running
from fcl_bench.flower.policy import Policy
from tests.flower.fake_superlink import FakeSuperLink, lost_link, reached
from tests.flower.test_withdrawal import SUMS, Sites, solution_of, weights
from tests.small_runs import run_in, settings_for

SMALL = ("data=digits", "clients=3", "tasks=2", "beta=1", "logger=none", "method=fedncm", "wire.dtype=float64")
OPEN = ("transport=flower", "transport.deadline=5", "transport.rounds=open")


class Holding(FakeSuperLink):
    """Nothing of a node that is held arrives until others have sent so many turns."""

    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.held, self.until = "", 0

    def pull(self, messages):
        turns = sum(kind == "turn" for _, kind in self.log)
        known = all(node in {name for name, kind in self.log if kind == "info"} for node in self.workers)
        there = {name: own for name, own in self._waiting.items() if name in messages}
        hold = {name for name, (node, _) in there.items() if node == self.held and known and turns < self.until}
        return super().pull({name: most for name, most in messages.items() if name not in hold})


@pytest.fixture
def link(tmp_path):
    return Holding(tmp_path / "nodes")


@pytest.fixture
def sites(tmp_path, monkeypatch, capsys):
    return Sites(tmp_path, monkeypatch, capsys)


def there(tmp_path, monkeypatch, link, *overrides):
    with reached(link, monkeypatch):
        return run_in(tmp_path / "there", *SMALL, *OPEN, *overrides)


def arrived(outcome):
    with (outcome.folder / "arrivals.csv").open(newline="") as file:
        return [(int(row["client"]), int(row["task"]), row["fate"]) for row in csv.DictReader(file)]


def require_whole(tmp_path, outcome):
    """The classifier is that of one process; each upload is in once."""
    one = run_in(tmp_path / "here", *SMALL)
    assert np.abs(weights(outcome.folder) - weights(one.folder)).max() < 1e-9
    assert outcome.record["metrics"]["A_T"] == one.record["metrics"]["A_T"]
    pairs = [(client, task, "absorbed") for client in range(3) for task in range(2)]
    assert sorted(arrived(outcome)) == pairs


@pytest.mark.slow
def test_nobody_waits_for_a_slow_node(tmp_path, monkeypatch, link):
    link.held, link.until = link.add_node(0), 2
    link.add_node(1, 2)
    done = there(tmp_path, monkeypatch, link)
    require_whole(tmp_path, done)
    assert [pair[:2] for pair in arrived(done)] == [(1, 0), (2, 0), (1, 1), (2, 1), (0, 0), (0, 1)]
    assert not list((tmp_path / "nodes").rglob("state.json"))


@pytest.mark.slow
def test_a_server_that_goes_on_asks_only_for_what_is_not_in(tmp_path, monkeypatch, link):
    link.held, link.until = link.add_node(0), 2
    link.add_node(1, 2)
    write, seen = running._write_current, []

    def stopped(plan, folder, federation, inputs):
        write(plan, folder, federation, inputs)
        seen.append(len(federation.arrivals))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(running, "_write_current", stopped)
        with pytest.raises(KeyboardInterrupt):
            there(tmp_path, monkeypatch, link, "transport.every=1")
    assert seen == [1, 2, 3]
    asked = []
    link.before = lambda node, kind, request: asked.extend(
        (turn[0], request.message.task) for turn in (request.beside["turns"] if kind == "turn" else ())
    )
    done = there(tmp_path, monkeypatch, link)
    require_whole(tmp_path, done)
    assert sorted(asked) == [(0, 0), (0, 1), (2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["node", "answer", "link"])
def test_what_is_lost_is_asked_for_again_and_counts_once(tmp_path, monkeypatch, link, harm):
    link.add_node(0)
    link.add_node(1, 2)
    harmed = []

    def lose(node, kind, request):
        if kind != "turn" or request.message.task != 1 or harmed or node != "node-2":
            return
        harmed.append(node)
        if harm == "node":
            link.kill(node)
            link.add_node(1, 2)
        elif harm == "answer":  # the turn is done, and its answer is lost
            raise TimeoutError("the answer was lost")
        else:
            raise lost_link()

    link.before = lose
    done = there(tmp_path, monkeypatch, link)
    assert harmed
    require_whole(tmp_path, done)


@pytest.mark.slow
def test_sites_of_open_rounds_can_withdraw(sites):
    """Also within a run, which then waits for nothing more of the site."""
    opened = (*SUMS, "transport.rounds=open")
    folder = sites.begun(*opened)
    sites.forget(folder, sites.leave(1, folder))
    sites.link.log.clear()
    done = sites.run(*opened)
    assert "node-2" not in {node for node, kind in sites.link.log if kind == "turn"}
    assert np.abs(weights(folder) - solution_of(sites.folder, (0, 2))).max() < 1e-9
    assert [entry["client"] for entry in done.record["transport"]["withdrawn"]] == [1]
    sites.forget(folder, sites.leave(0, folder))
    assert np.abs(weights(folder) - solution_of(sites.folder, (2,))).max() < 1e-9


@pytest.mark.slow
def test_a_node_that_refuses_or_is_gone_ends_the_run_in_one_line_and_the_same_command_goes_on(
    tmp_path, monkeypatch, link
):
    link.add_node(0)
    refusing = link.add_node(1, 2, policy=Policy(own_data=False, smallest_group=10**6))
    with pytest.raises(UserError, match=r"client [12] was lost before its upload of task 0: the node .*error 1\d"):
        there(tmp_path, monkeypatch, link)
    link.kill(refusing)
    with pytest.raises(UserError, match="client 1 has no node|was lost before its upload of task 0: nobody has answ"):
        there(tmp_path, monkeypatch, link, "transport.deadline=0.5")
    link.add_node(1, 2)
    require_whole(tmp_path, there(tmp_path, monkeypatch, link))


@pytest.mark.slow
def test_a_node_that_answers_for_another_task_is_refused(tmp_path, monkeypatch, link):
    name = link.add_node(0, 1, 2)
    answer = link.workers[name].answer

    def other(request):
        found = []
        for one in answer(request):
            message, beside = blob.unpacked(one)
            message = dataclasses.replace(message, task=1) if beside["kind"] == "reply" else message
            found.append(blob.packed(message, **beside))
        return found

    link.workers[name].answer = other
    with pytest.raises(UserError, match="the node of client 0 answers for another task than it was asked for"):
        there(tmp_path, monkeypatch, link)


def test_open_rounds_over_flower_need_no_minimum_and_have_an_id_of_their_own(tmp_path):
    with pytest.raises(UserError, match="goes on without no client"):
        settings_for(tmp_path, *SMALL, *OPEN, "transport.minimum=0.5")
    simulated = settings_for(tmp_path, *SMALL, "transport.rounds=open").identity()
    real = settings_for(tmp_path, *SMALL, *OPEN).identity()
    assert real["transport"] == {"rounds": "open", "order": "as they come"} != simulated["transport"]
