"""Runs whose clients are on nodes give the bits of runs in one process, whatever is lost on the way."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fcl_bench.engine.remote import process_info
from fcl_bench.errors import UserError
from fcl_bench.flower import site
from fcl_bench.flower.policy import OPEN
from tests.flower.fake_superlink import FakeSuperLink, lost_link, reached
from tests.small_methods import short_run
from tests.small_runs import interrupted_in, run_in

SMALL = ("data=digits", "clients=3", "tasks=2", "beta=1", "logger=none")
FLOWER = ("transport=flower", "transport.deadline=20")
#: Closed form, sequential, with masks, with a registration first, trained, with clients' states, with their memories.
METHODS = ("afl", "stsa_e", "fedran", "centred_sketch", "afcl", "fedavg", "fedprotip", "fedicarl")


def model(outcome) -> bytes:
    return (outcome.folder / "model.safetensors").read_bytes()


def rows(outcome) -> list[dict[str, str]]:
    with (outcome.folder / "uploads.csv").open() as file:
        return list(csv.DictReader(file))


def plain(outcome) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "client_seconds"} for row in rows(outcome)]


@pytest.fixture
def link(tmp_path):
    return FakeSuperLink(tmp_path / "nodes")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A run in one process, done once."""
    done = {}

    def run(*overrides):
        if overrides not in done:
            done[overrides] = run_in(tmp_path_factory.mktemp("here"), *SMALL, *overrides)
        return done[overrides]

    return run


def there(tmp_path, monkeypatch, link, *overrides):
    with reached(link, monkeypatch):
        return run_in(tmp_path / "there", *SMALL, *FLOWER, *overrides)


def of(method):
    return f"method={method}", *short_run(method)


@pytest.mark.slow_cases("afcl", "afl", "centred_sketch", "fedavg", "fedicarl", "fedprotip", "fedran", "stsa_e")
@pytest.mark.parametrize("method", METHODS)
def test_the_model_and_the_ledger_are_those_of_one_process(tmp_path, monkeypatch, here, link, method):
    link.add_node(0)
    link.add_node(1, 2)
    one, many = here(*of(method)), there(tmp_path, monkeypatch, link, *of(method))
    assert model(many) == model(one)
    assert plain(many) == plain(one)
    for part in ("metrics", "communication", "privacy", "client_storage_bytes", "absences"):
        assert many.record[part] == one.record[part], part
    assert many.record["transport"]["name"] == "flower"
    assert [node["clients"] for node in many.record["transport"]["nodes"]] == [[0], [1, 2]]
    # Nothing of a complete run stays at the nodes.
    assert not list((tmp_path / "nodes").rglob("state.json"))


def features(path, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.tile(np.arange(4), 30)
    centres = rng.normal(size=(4, 12))
    sides = [(centres[labels] + rng.normal(size=(120, 12))).astype(np.float32) for _ in range(2)]
    np.savez(path, x_train=sides[0], y_train=labels, x_test=sides[1], y_test=labels)
    return f"data.path={path}"


@pytest.mark.slow_cases("afl", "centred_sketch", "fedavg", "fedicarl", "fedprotip", "fedran", "stsa_e")
@pytest.mark.parametrize(
    "method", ["afl", "stsa_e", "fedran", "centred_sketch", "afcl", "fedavg", "fedicarl", "fedprotip"]
)
def test_a_node_looks_at_no_other_clients_rows(tmp_path, monkeypatch, here, link, method):
    """All rows but its own are NaN in each node's process."""
    trained = ("method.trains=features", "method.training.rounds=2", "method.training.epochs=1")
    given = ("data=features", features(tmp_path / "f.npz"), f"method={method}")
    given += trained if method in ("fedavg", "fedicarl", "fedprotip") else short_run(method)
    given += ("method.frozen_stages=0",) if method == "fedprotip" else ()
    poisoned = []

    def blind(own):
        def make(run):
            whole = site.make_plan

            def plan_of(settings):
                plan = whole(settings)
                inputs = plan.dealt.dataset.train.inputs
                others = np.setdiff1d(
                    np.arange(len(inputs)), np.concatenate([t[k] for t in plan.dealt.shards for k in own])
                )
                inputs[others] = np.nan
                poisoned.append(len(others))
                return plan

            with monkeypatch.context() as patch:
                patch.setattr(site, "make_plan", plan_of)
                return site.site_of(run, {"out": str(tmp_path / "n"), "cache.enabled": False}, own, OPEN)

        return make

    for client in range(3):
        link.add_node(client, make=blind([client]))
    one, many = here(*given), there(tmp_path, monkeypatch, link, *given)
    assert len(poisoned) == 3
    assert min(poisoned) > 50
    assert model(many) == model(one)


@pytest.mark.slow_cases("fedicarl", "fedprotip")
@pytest.mark.parametrize("method", ["fedprotip", "fedicarl"])
def test_a_node_that_is_killed_and_started_again_goes_on_with_what_its_client_kept(
    tmp_path, monkeypatch, here, link, method
):
    link.add_node(0)
    link.add_node(1, 2)
    killed = []

    def kill(node, kind, request):
        # In the second task, so that there is something kept; after some of the turns, too.
        if kind == "turn" and request.message.task == 1 and not killed and node == "node-2":
            killed.append(node)
            link.kill(node)
            link.add_node(1, 2)

    link.before = kill
    one, many = here(*of(method)), there(tmp_path, monkeypatch, link, *of(method))
    assert killed
    assert model(many) == model(one)
    assert plain(many) == plain(one)


@pytest.mark.slow
def test_a_turn_that_is_done_twice_is_one_turn(tmp_path, monkeypatch, here, link):
    """The answer is lost after the turn was done: it is asked for again, from the state before it."""
    link.add_node(0)
    link.add_node(1, 2)
    twice = []

    def lose(node, kind, request):
        if kind == "turn" and request.message.task == 1 and len(twice) < 2:
            twice.append(node)
            from fcl_bench.engine.remote.replies import serialise

            link.workers[node].answer(serialise("turn", request.message, **request.beside))
            raise TimeoutError("the answer was lost")

    link.before = lose
    one, many = here(*of("fedprotip")), there(tmp_path, monkeypatch, link, *of("fedprotip"))
    assert len(twice) == 2
    assert model(many) == model(one)


@pytest.mark.slow
def test_a_superlink_that_is_gone_for_a_while_is_waited_for(tmp_path, monkeypatch, here, link):
    link.add_node(0, 1, 2)
    gone = []

    def cut(node, kind, request):
        if kind == "turn" and request.message.task == 1 and not gone:
            gone.append(node)
            raise lost_link()

    link.before = cut
    one, many = here(*of("fedicarl")), there(tmp_path, monkeypatch, link, *of("fedicarl"))
    assert gone
    assert model(many) == model(one)


def silent_from(link, task, node):
    def hush(asked, kind, request):
        if kind == "turn" and request.message.task >= task and asked == node and node in link.workers:
            link.kill(node)

    link.before = hush


@pytest.mark.slow
def test_a_client_that_is_lost_ends_the_run_and_the_same_command_goes_on(tmp_path, monkeypatch, here, link):
    link.add_node(0, 1)
    lost = link.add_node(2)
    silent_from(link, 1, lost)
    given = (*SMALL, *FLOWER, "transport.deadline=1", "method=fedprotip", *short_run("fedprotip"))
    one = here(*of("fedprotip"))
    with reached(link, monkeypatch):
        with pytest.raises(UserError, match="client 2 was lost in task 1, round 0: no answer within 1 seconds"):
            run_in(tmp_path / "there", *given)
        link.add_node(2)
        many = run_in(tmp_path / "there", *given)
    assert model(many) == model(one)
    assert not any(int(row["lost"]) for row in rows(many))


def test_a_partial_round_counts_who_is_lost(tmp_path, monkeypatch, link):
    link.add_node(0, 1)
    silent_from(link, 1, link.add_node(2))
    with reached(link, monkeypatch):
        given = ("transport.deadline=1", "transport.minimum=0.6", "method=afl")
        many = run_in(tmp_path / "there", *SMALL, *FLOWER, *given)
    assert [row["client"] for row in rows(many) if int(row["lost"])] == ["2"]
    assert many.record["absences"]["lost"] == 1
    assert [int(row["up_bytes"]) for row in rows(many) if row["task"] == "1"][2] == 0


@pytest.mark.slow
def test_an_interrupted_server_goes_on_with_what_the_nodes_kept(tmp_path, monkeypatch, here, link):
    link.add_node(0)
    link.add_node(1, 2)
    given = ("method=fedicarl", *short_run("fedicarl"))
    one = here(*given)
    with reached(link, monkeypatch):
        with interrupted_in(1, monkeypatch):
            run_in(tmp_path / "there", *SMALL, *FLOWER, *given)
        # Other processes at the nodes, too: all that is left of them is on their disks.
        link.workers.clear()
        link.add_node(0)
        link.add_node(1, 2)
        many = run_in(tmp_path / "there", *SMALL, *FLOWER, *given)
    assert model(many) == model(one)


@pytest.mark.slow
def test_what_a_node_lost_of_its_clients_ends_the_run_in_one_line(tmp_path, monkeypatch, link, caplog):
    link.add_node(0, 1, 2)
    given = (*SMALL, *FLOWER, "method=fedicarl", *short_run("fedicarl"))
    with reached(link, monkeypatch):
        with interrupted_in(1, monkeypatch):
            run_in(tmp_path / "there", *given)
        link.workers.clear()
        saved = sorted((tmp_path / "nodes").rglob("*.safetensors"))
        assert [file.parent.parent.name for file in saved] == ["task-0-round-2"] * 3
        assert saved[1].parent.name == "client-1"
        content = saved[1].read_bytes()
        saved[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        link.add_node(0, 1, 2)
        lacks = "client 1 was lost in task 1, round 0: .*error 21: it lacks a state"
        with pytest.raises(UserError, match=lacks):
            run_in(tmp_path / "there", *given)
        assert "task-0-round-2 lacks what 1 clients stored, client 1 for one" in caplog.text
        assert "client-1 is damaged (it does not match its checksum" in caplog.text
        saved[1].unlink()
        with pytest.raises(UserError, match=lacks):
            run_in(tmp_path / "there", *given)


@pytest.mark.slow
def test_nodes_that_would_give_other_results_are_refused_before_the_first_round(tmp_path, monkeypatch, link):
    given = (*SMALL, *FLOWER, "transport.deadline=1", "method=afl")
    with reached(link, monkeypatch):
        link.add_node(0, 1, 2, changes={"seed": 1})
        with pytest.raises(UserError, match="the node of clients 0, 1, 2 has the run .*, the server"):
            run_in(tmp_path / "a", *given)
        link.workers.clear()
        link.add_node(0, 1)
        with pytest.raises(UserError, match=r"client 2 has no node after 1 seconds \(1 of 3 clients"):
            run_in(tmp_path / "b", *given)
        link.add_node(1, 2)
        link.add_node(3)
        with pytest.raises(UserError, match=r"the node of client 3: error 20"):
            run_in(tmp_path / "c", *given)
    assert not list(tmp_path.glob("[abc]/runs/*/run.json"))


@pytest.fixture
def unequal_threads(monkeypatch):
    """The server's process says that it has 3 threads and nodes 5; torch itself says the truth."""
    here = process_info.ProcessInfo.here.__func__
    seen = SimpleNamespace(__version__=torch.__version__, get_num_threads=None)

    def unequal(cls, process, *rest, **more):
        seen.get_num_threads = lambda: 3 if process == "the server" else 5
        return here(cls, process, *rest, **more)

    monkeypatch.setattr(process_info, "torch", seen)
    monkeypatch.setattr(process_info.ProcessInfo, "here", classmethod(unequal))


def test_threads_have_to_be_as_many(tmp_path, monkeypatch, link, unequal_threads):
    link.add_node(0, 1, 2)
    with reached(link, monkeypatch), pytest.raises(UserError, match="has threads: 5, the server 3"):
        run_in(tmp_path / "a", *SMALL, *FLOWER, "method=stsa", "method.M=2049")


def test_a_small_run_has_one_thread_on_every_node(tmp_path, monkeypatch, link, unequal_threads):
    link.add_node(0, 1, 2)
    with reached(link, monkeypatch):
        record = run_in(tmp_path / "a", *SMALL, *FLOWER, "method=afl").record
    assert record["environment"]["threads"] == 1
    assert [node["threads"] for node in record["transport"]["nodes"]] == [1]


def test_a_first_stage_and_audits_are_refused(tmp_path, monkeypatch, link):
    link.add_node(0, 1, 2)
    with reached(link, monkeypatch):
        with pytest.raises(UserError, match="drift"):
            run_in(tmp_path / "a", *SMALL, *FLOWER, "method=fedavg", *short_run("fedavg"), "drift=2")
        adapted = ("adapt=fedavg", "backbone=tiny", "backbone.width=4", "adapt.training.rounds=1", "method=afl")
        with pytest.raises(UserError, match="adapt="):
            run_in(tmp_path / "b", *SMALL, *FLOWER, *adapted)


def test_the_record_says_what_the_nodes_are(tmp_path, monkeypatch, link):
    link.add_node(0, 1, 2)
    with reached(link, monkeypatch):
        many = run_in(tmp_path / "there", *SMALL, *FLOWER, "method=afl")
    (node,) = json.loads((many.folder / "run.json").read_text())["transport"]["nodes"]
    assert set(node) == {"clients", "fcl_bench", "torch", "threads", "device", "platform", "data", "software"}
    assert node["threads"] == many.record["environment"]["threads"]
