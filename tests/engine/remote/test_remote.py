"""Clients in other processes: the bits of one process, what clients keep, uploads left out, processes that go."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.engine.checkpoint import ClientStore, as_state, new_tag, tag_of
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.node import Node
from fcl_bench.engine.remote.process_info import ProcessInfo, require_alike
from fcl_bench.engine.remote.replies import deserialise, serialise
from fcl_bench.errors import UserError
from fcl_bench.methods.averaging.scaffold import Scaffold
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.protocol.message import Message
from tests.engine.counting import federation
from tests.engine.remote.host_peers import Remotes
from tests.engine.test_transport import training
from tests.methods.harness import context_of
from tests.methods.test_fedprotip_tip import UPDATED
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context

#: Of two processes, the first has clients 0 and 2.
SIZES = [[4, 9, 5], [5, 8, 3]]
CASES = {
    "fedran": lambda: (FedRAN(M=12, rank=3, ssl=True, tau=-1.0), context_of(6), feature_tasks(0, [2, 2], SIZES)),
    "fedprotip": lambda: (
        FedProTIP(training=training(), frozen_stages=1, tip=UPDATED, columns=8),
        tiny_context(),
        image_tasks(np.random.default_rng(0), [2, 2], SIZES),
    ),
    "scaffold": lambda: (
        Scaffold(training=training()),
        tiny_context(),
        image_tasks(np.random.default_rng(0), [2, 2], SIZES),
    ),
}
#: Client 1 of task 0 knows no label.
UNLABELLED = {"fedran": [(0, 1)]}


def made(case: str, transport):
    return federation_of(*CASES[case](), transport=transport, unlabelled=UNLABELLED.get(case, []))


def bits(run) -> dict[str, torch.Tensor]:
    return {**run.server.state_dict(), **run.server.model()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def rows(run) -> list[tuple]:
    return [dataclasses.astuple(dataclasses.replace(row, client_seconds=0.0)) for row in run.state.ledger.uploads]


@pytest.mark.slow_cases("fedprotip")
@pytest.mark.parametrize("case", CASES)
def test_processes_that_know_their_own_clients_alone_give_the_same_bits(case, tmp_path):
    """The samples of all other clients are NaN, or white, before a process takes its own; then it has no others."""
    alone, remotes = made(case, InProcess.of), Remotes(tmp_path)
    apart = made(case, remotes)
    alone.run(lambda _: None)
    apart.run(lambda _: None)
    assert same(bits(alone), bits(apart))
    assert rows(alone) == rows(apart)
    ledgers = [run.state.ledger for run in (alone, apart)]
    assert ledgers[0].single_samples() == ledgers[1].single_samples()
    assert ledgers[0].communication() == ledgers[1].communication()
    for process, host in enumerate(remotes.hosts):
        own = [len(clients[k]) for clients in host.node.data.holdings for k in range(3)]
        assert own == [size if k % 2 == process else 0 for clients in SIZES for k, size in enumerate(clients)]
        assert len(host.node.data._inputs) == sum(own)


def test_the_test_above_can_fail(tmp_path):
    """One sample of a client in another's place changes bits."""

    class Swapped(Remotes):
        def __call__(self, method, context, holdings, columns, labelled, inputs, middleware=()):
            inputs = inputs.clone()
            inputs[0] += 1e-6
            return super().__call__(method, context, holdings, columns, labelled, inputs, middleware)

    alone, apart = made("fedran", InProcess.of), made("fedran", Swapped(tmp_path))
    alone.run(lambda _: None)
    apart.run(lambda _: None)
    assert not same(bits(alone), bits(apart))


@pytest.mark.slow_cases("three processes-fedprotip", "two processes-fedprotip")
@pytest.mark.parametrize("case", ["fedprotip", "scaffold"])
@pytest.mark.parametrize("after", ["two processes", "three processes", "one process"])
def test_what_clients_keep_is_saved_where_they_are_and_any_number_of_processes_goes_on(case, after, tmp_path):
    whole = made(case, InProcess.of)
    whole.run(lambda _: None)
    saved = {}

    def stop(run):
        saved.update(state=run.save())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(case, Remotes(tmp_path)).run(stop)
    state, tensors = saved["state"]
    assert [name for name in tensors if name.startswith("client.")] == ["client.elsewhere"]
    if after == "one process":

        def again(*parts):
            return InProcess(InProcess.of(*parts)._node, ClientStore(tmp_path, "a run"))
    else:
        again = Remotes(tmp_path, processes=2 if after == "two processes" else 3)
    resumed = made(case, again)
    resumed.restore(state, {name: value.clone() for name, value in tensors.items()})
    resumed.run(lambda _: None)
    assert same(bits(whole), bits(resumed))


def test_processes_go_on_from_what_one_process_kept(tmp_path):
    whole, saved = made("scaffold", InProcess.of), []
    whole.run(lambda run: saved.append(copy.deepcopy(run.save())) if not saved else None)
    state, tensors = saved[0]
    resumed = made("scaffold", Remotes(tmp_path))
    resumed.restore(state, tensors)
    resumed.run(lambda _: None)
    assert same(bits(whole), bits(resumed))


@pytest.mark.parametrize("damage", ["gone", "another run's", "another save's"])
def test_a_run_whose_clients_lost_what_they_kept_stops_with_a_line(damage, tmp_path):
    saved = []
    made("scaffold", Remotes(tmp_path)).run(lambda run: saved.append(run.save()) if not saved else None)
    state, tensors = saved[0]
    if damage == "gone":
        for folder in tmp_path.glob("*/process-1"):
            (folder / "state.json").unlink()
    elif damage == "another run's":
        for file in tmp_path.glob("*/process-1/state.json"):
            file.write_text(file.read_text().replace("a run", "b run"))
    else:
        tensors = {**tensors, "client.elsewhere": as_state(new_tag(0, 1))["elsewhere"]}
    with pytest.raises(UserError, match=r"lacks what [12] clients stored, client \d for one \("):
        made("scaffold", Remotes(tmp_path)).restore(state, tensors)


@pytest.mark.parametrize("gone", [False, True])
def test_processes_forget_what_clients_kept_when_the_run_is_complete(tmp_path, caplog, gone):
    """On disks of their own, which the server's process does not see, it stayed there for good."""
    remotes = Remotes(tmp_path)
    federation = made("scaffold", remotes)
    federation.run(lambda run: run.save())
    assert list(tmp_path.glob("*/process-1"))
    if gone:
        remotes.peers[1].gone = True
    federation.transport.delete_states()
    assert not tmp_path.exists()  # of one folder, whichever deletes it
    assert (
        "process 1 was lost: its cable was cut; the states of its clients stay where they are" in caplog.text
    ) == gone


def test_a_process_retains_its_last_two_saves(tmp_path):
    """The server may be killed before it has its own."""
    remotes = Remotes(tmp_path)
    run, tags = made("scaffold", remotes), []
    run.run(lambda run: tags.append(tag_of(run.transport.state_dict())))
    host = remotes.hosts[1]
    saved = {entry.parent.name for entry in tmp_path.glob("*/process-1")}
    assert saved == set(tags[-2:])
    host.restore(as_state(tags[-2]))
    host.save("another")
    saved = {entry.parent.name for entry in tmp_path.glob("*/process-1")}
    assert saved == {tags[-2], "another"}, "the one before, until the server has the next"


def test_saves_have_names_of_their_own():
    assert len({new_tag(0, 0), new_tag(0, 0), new_tag(0, 1)}) == 3


@pytest.mark.parametrize("case", CASES)
def test_the_servers_process_does_its_turns_instead_of_waiting_and_the_bits_are_the_same(case, tmp_path, monkeypatch):
    """The answers of the other process have never come when one looks, so all of its own clients go first."""
    turns = []
    turn = Node.turn
    alone, remotes = made(case, InProcess.of), Remotes(tmp_path)
    apart = made(case, remotes)
    alone.run(lambda _: None)
    remotes.peers[1].slow = True
    monkeypatch.setattr(Node, "turn", lambda self, client, sent: (turns.append(client), turn(self, client, sent))[1])
    apart.run(lambda _: None)
    assert same(bits(alone), bits(apart))
    assert rows(alone) == rows(apart)
    rounds = len({(row.task, row.round) for row in alone.state.ledger.uploads})
    first = [0, 2] if case == "fedran" else [0, 2, 1]
    assert turns == [*first, *[0, 2, 1] * (rounds - 1)]


def test_the_state_of_a_client_whose_upload_waited_and_was_refused_is_the_one_before_its_turn(tmp_path):
    kept = []
    for transport in (InProcess.of, Remotes(tmp_path)):
        context, tasks = tiny_context(), image_tasks(np.random.default_rng(0), [2], [[4, 9, 5]])
        run = federation_of(Scaffold(training=training()), context, tasks, transport=transport, drops=True)
        # The sixth is client 2's of the second round: its turn came before client 1's.
        objecting_to(run.server, 6)
        if transport != InProcess.of:
            transport.peers[1].slow = True
        run.run(lambda _: None)
        nodes = [run.transport._node] if transport == InProcess.of else [host.node for host in transport.hosts]
        kept.append(({k: v for node in nodes for k, v in node.state_dict().items()}, run.state.ledger.dropped()))
    assert kept[0][1] == kept[1][1] == [(2, 1)]
    assert same(kept[0][0], kept[1][0])


def test_no_turn_is_done_ahead_once_the_answer_is_there(tmp_path, monkeypatch):
    turns, taken = [], []
    turn = Node.turn
    monkeypatch.setattr(Node, "turn", lambda self, client, sent: (turns.append(client), turn(self, client, sent))[1])
    run = made("fedran", Remotes(tmp_path))
    absorb = run.server.absorb
    run.server.absorb = lambda client, upload: (taken.append(len(turns)), absorb(client, upload))[1]
    run.run(lambda _: None)
    assert taken == list(range(1, len(turns) + 1))


def test_a_broadcast_goes_once_to_each_process_and_not_to_those_without_a_participant(tmp_path):
    remotes = Remotes(tmp_path, processes=3)
    made("fedran", remotes).run(lambda _: None)
    # Client 1 has no label in task 0.
    assert {number: peer.sent for number, peer in remotes.peers.items()} == {1: 1, 2: 2}


def objecting_to(server, number: int) -> None:
    """The upload of this number, from 1, is found to contradict itself."""
    objection, seen = server.objection, []

    def found(upload):
        seen.append(upload)
        return "it is that one" if len(seen) == number else objection(upload)

    server.objection = found


def test_clients_whose_uploads_are_refused_have_the_state_before(tmp_path):
    """Also where the refusal comes after turns of other clients of the same process."""
    found = []
    for transport in (InProcess.of, Remotes(tmp_path)):
        context, tasks = tiny_context(), image_tasks(np.random.default_rng(0), [2], [[9, 4, 5, 6]])
        run = federation_of(Scaffold(training=training()), context, tasks, transport=transport, drops=True)
        objecting_to(run.server, 6)
        run.run(lambda _: None)
        nodes = [run.transport._node] if transport == InProcess.of else [host.node for host in transport.hosts]
        if transport != InProcess.of:
            assert transport.hosts[1].own == [1, 3]
            # The last round's refusals travel with the next request.
            run.transport.state_dict()
        found.append(({k: v for node in nodes for k, v in node.state_dict().items()}, run.state.ledger.dropped()))
    assert found[0][1] == found[1][1] == [(1, 1)]
    assert same(found[0][0], found[1][0])


def test_a_process_that_goes_ends_the_run_or_leaves_a_partial_round(tmp_path):
    for minimum, share in ((None, ""), (0.7, "; 2 of 3 clients are left, and transport.minimum=0.7"), (0.5, None)):
        remotes = Remotes(tmp_path)
        run = made("fedran", remotes)
        run._missing._minimum = minimum
        whole = run.transport.exchange

        def cut(present, broadcast, remotes=remotes, whole=whole):
            if broadcast.task == 1:
                remotes.peers[1].gone = True
            return whole(present, broadcast)

        run.transport.exchange = cut
        if share is None:
            run.run(lambda _: None)
            assert run.state.absences["lost"] == 1
            assert [(row.task, row.client) for row in run.state.ledger.uploads if row.lost] == [(1, 1)]
            continue
        with pytest.raises(UserError) as told:
            run.run(lambda _: None)
        line = f"client 1 was lost in task 1, round 0: its cable was cut{share} (the same command goes on"
        assert str(told.value).startswith(line)


def test_errors_of_a_process_are_told_in_its_words(tmp_path):
    """A user's as the user's; others with where they came from."""
    remotes = Remotes(tmp_path)
    run, _ = federation(transport=remotes)
    client = remotes.hosts[1].node.client

    def wrong(client_data, broadcast, state):
        raise UserError("wire.dtype=float16 can't hold it", "wire.dtype=float64")

    client.update = wrong
    with pytest.raises(UserError, match=r"^wire.dtype=float16 can't hold it \(wire.dtype=float64\)$"):
        run.run(lambda _: None)
    run, _ = federation(transport=remotes)
    remotes.hosts[1].node.client.update = lambda *_: 1 / 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        run.run(lambda _: None)


def test_audits_are_refused_over_processes(tmp_path):
    from fcl_bench.execution.drift import FeatureDrift

    with pytest.raises(UserError, match="the audits drift need the clients' data, which stay where they are"):
        federation(transport=Remotes(tmp_path), audits={"drift": FeatureDrift(3, 0, [[], []])})


def test_a_message_without_tensors_keeps_what_it_says():
    """It is false as a mapping is."""
    received = deserialise(serialise("exchange", Message({}, "ask", task=3, round=2), clients=[1]))
    assert (received.message.stage, received.message.task, received.message.round) == ("ask", 3, 2)
    assert (received.kind, received.beside) == ("exchange", {"clients": [1]})


INFO = ProcessInfo("the server", "id", "0.3", "2.8", 1, None, "cpu")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"torch_version": "2.7"}, "rank 1 has torch 2.7, the server 2.8 (the same version everywhere)"),
        ({"run": "other"}, "rank 1 has the run other, the server id (the same command, data and device everywhere)"),
        (
            {"threads": 4, "torch_version": "2.7"},
            "rank 1 has torch 2.7, the server 2.8; rank 1 has threads: 4, the server 1 (the same version"
            " everywhere; the same threads= and OMP_NUM_THREADS everywhere, since sums round by the number of threads)",
        ),
    ],
)
def test_processes_that_differ_are_told_in_one_line(change, line):
    require_alike(INFO, [dataclasses.replace(INFO, process="rank 1")])
    with pytest.raises(UserError) as told:
        require_alike(INFO, [dataclasses.replace(INFO, process="rank 1", **change)])
    assert str(told.value) == line


def test_a_process_of_another_version_is_told_in_one_line():
    with pytest.raises(UserError, match=r"^rank 1 has fcl-bench 0\.2, the server .* \(the same version everywhere\)$"):
        ProcessInfo.read({"process": "rank 1", "package": "0.2", "what": "it had then"})


def test_the_threads_that_count_are_those_that_compute(monkeypatch):
    """A run that is small has the same bits whatever OMP_NUM_THREADS is; a network that computes before it has not."""
    small, large = dataclasses.replace(context_of(6), threads=1), dataclasses.replace(context_of(6), threads=None)

    def info(process, threads, context, prepared):
        with monkeypatch.context() as patch:
            patch.setattr("fcl_bench.engine.remote.process_info.torch.get_num_threads", lambda: threads)
            return ProcessInfo.here(process, "id", context, prepared)

    def compared(context, prepared):
        require_alike(info("the server", 2, context, prepared), [info("rank 1", 8, context, prepared)])

    compared(small, False)
    with pytest.raises(UserError, match="rank 1 has threads: 8, the server 2"):
        compared(large, False)
    with pytest.raises(UserError, match="rank 1 has threads for the network before the method: 8, the server 2"):
        compared(small, True)
