"""A site's epsilon: what one release is, where a method's clients keep states that the server names."""

from __future__ import annotations

import json

import pytest

from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.flower.policy import Policy
from fcl_bench.flower.refusals import SPENT
from fcl_bench.flower.worker import Turn, save_name
from tests.flower.fake_superlink import FakeSuperLink, reached
from tests.flower.test_sites import GIVEN, SITES, divided
from tests.small_runs import run_in

pytest.importorskip("dp_accounting")
NOISE = ("noise=gaussian", "noise.unit=client", "noise.epsilon=8", "dtype=float64")
FEDDYN = ("method=feddyn", "method.trains=features", "method.training.rounds=2", "method.training.epochs=1")
POLICY = Policy(smallest_group=1, epsilon=10)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A federation of sites with a policy of epsilon, and the requests for turns of client 0 in an honest run."""
    divided(tmp_path)
    link, requests = FakeSuperLink(tmp_path / "nodes"), []
    for client in range(3):
        link.add_node(client, changes={"data.path": str(tmp_path / f"site-{client}.npz")}, policy=POLICY)
    link.before = lambda node, kind, request: requests.append(request) if (node, kind) == ("node-1", "turn") else None
    given = (*GIVEN[:-1], *SITES, *NOISE, *FEDDYN, f"data.path={tmp_path / 'test.npz'}")

    def work(*overrides):
        with reached(link, monkeypatch):
            run_in(tmp_path / "run", *given, *overrides)
        return requests

    return work


def lines(folder):
    return [json.loads(line) for line in (folder / "nodes" / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_an_upload_without_tensors_needs_no_noise(run, tmp_path):
    """An honest run of FedDyn has one more stage, in which clients say how many samples they have."""
    run("method.scaled=true")
    turns = [line for line in lines(tmp_path / "nodes" / "0") if line["kind"] == "turn"]
    assert [len(line["fields"]) > 0 for line in turns].count(True) == 4
    assert [line["stage"] for line in turns if not line["fields"]] == ["sizes", "sizes"]


@pytest.mark.slow
def test_a_turn_from_another_state_is_another_release(run, tmp_path):
    """The server names the state with which a turn begins, and could so have the noise drawn again and again."""
    request = run("method.scaled=false")[1]
    link, state, sent = FakeSuperLink(tmp_path / "again"), None, []
    name = link.add_node(0, changes={"data.path": str(tmp_path / "site-0.npz")}, policy=POLICY)
    about = {"run": request.beside["run"], "seconds": 60}
    for _ in range(6):
        turns = [Turn(0, state, None)]
        (blob,) = link.workers[name].answer(serialise("turn", request.message, turns=turns, **about))
        sent.append(deserialise(blob))
        state = save_name(request.message)
    assert [answer.beside.get("code") for answer in sent] == [None, None, *[SPENT] * 4]
    # What left may leave again, from the very same state.
    (blob,) = link.workers[name].answer(serialise("turn", request.message, turns=[Turn(0, None, None)], **about))
    again = deserialise(blob).message
    assert all(again[key].equal(tensor) for key, tensor in sent[0].message.items())
