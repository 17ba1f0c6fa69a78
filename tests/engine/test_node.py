"""One turn of a client, which needs neither the server nor the others; and what clients keep between their turns."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fcl_bench.engine.codec import Codec
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.node import UNKNOWN, Node, NodeData, samples_in, stored_bytes
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.methods.projection.task_identity import Tip
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from tests.engine.counting import CountingClient, federation
from tests.methods.harness import context_of, turn
from tests.methods.test_every_method import METHODS
from tests.methods.test_fedprotip_tip import UPDATED
from tests.methods.training_harness import (
    feature_tasks,
    federation_of,
    image_shard,
    image_tasks,
    images_stream,
    learn_image_task,
    tiny_context,
)

FAST = Training(rounds=1, epochs=1, batch_size=8, lr=0.05, augment="none")
GRADIENT = {"fedavg": FedAvg(training=FAST), "fedprotip": FedProTIP(training=FAST, frozen_stages=1, columns=8)}


# A turn ---------------------------------------------------------------------------------------------------------------


def node_of(method, context, tasks, spoilt: float | int | None = None, keep: int = 1) -> Node:
    """A node with everyone's samples; `spoilt` is put over all samples but those of client `keep`."""
    images, labels = (torch.cat([parts[i] for clients in tasks for parts in clients]) for i in (0, 1))
    sizes = [[len(part) for _, part in clients] for clients in tasks]
    ends = np.cumsum(np.concatenate(sizes))
    parts = iter(np.split(np.arange(len(labels)), ends[:-1]))
    holdings = [[next(parts) for _ in clients] for clients in tasks]
    if spoilt is not None:
        mine = np.concatenate([clients[keep] for clients in holdings])
        others = np.setdiff1d(np.arange(len(labels)), mine)
        images[others] = spoilt
        labels[others] = 0
    data = NodeData(context, holdings, labels.numpy(), images)
    uploads = Uploads.of(method, context)
    return Node(method.client(context), context, data, Codec(uploads, context.wire), uploads)


def broadcasts(method, context, tasks) -> list[Message]:
    """What a server sends in each round of the first task; everyone has answered the rounds before."""
    server, task, sent = method.server(context), images_stream(tasks)[0], []
    broadcast = server.broadcast
    server.broadcast = lambda *where: sent.append(copy.deepcopy(broadcast(*where))) or sent[-1]
    learn_image_task(method, context, server, task, tasks[0])
    return sent


def same(a: Message, b: Message) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_turn_needs_no_server_and_nobody_elses_features(method):
    context, tasks = context_of(6), feature_tasks(0, [3], [[20, 15, 12]])
    for broadcast in broadcasts(method, context, tasks):
        plain, alone = (node_of(method, context, tasks, spoilt).turn(1, broadcast) for spoilt in (None, torch.nan))
        assert plain.upload.stage == broadcast.stage
        assert all(bool(torch.isfinite(value).all()) for value in alone.upload.values())
        assert same(plain.upload, alone.upload)


@pytest.mark.parametrize("method", GRADIENT.values(), ids=GRADIENT.keys())
def test_a_turn_needs_no_server_and_nobody_elses_images(method):
    context, tasks = tiny_context(), image_tasks(np.random.default_rng(0), [3], [[9, 11, 8]])
    stages = set()
    for round_, broadcast in enumerate(broadcasts(method, context, tasks)):
        plain, alone = (
            node_of(method, context, tasks, spoilt).turn(1, dataclasses.replace(broadcast, task=0, round=round_))
            for spoilt in (None, 255)
        )
        stages.add(alone.upload.stage)
        assert same(plain.upload, alone.upload)
        assert plain.upload.samples == alone.upload.samples
    assert stages == set(method.stages(images_stream(tasks)[0]))


def test_who_went_before_does_not_matter_and_an_upload_stays_as_it_is():
    """One network serves all clients, so an upload must not be a part of it."""
    method, context = GRADIENT["fedavg"], tiny_context()
    tasks = image_tasks(np.random.default_rng(0), [3], [[9, 11, 8]])
    [broadcast] = broadcasts(method, context, tasks)
    node = node_of(method, context, tasks)
    first = node.turn(1, broadcast).upload
    before = {name: value.clone() for name, value in first.items()}
    node.turn(2, broadcast)
    assert all(torch.equal(value, before[name]) for name, value in first.items())
    assert same(first, node.turn(1, broadcast).upload)


def test_the_upload_says_which_turn_it_is_of():
    made, _ = federation()
    node = made.transport._node
    reply = node.turn(2, Message({"round": torch.tensor(1)}, "statistics", task=1, round=7))
    upload = reply.upload
    assert (upload.stage, upload.task, upload.round) == ("statistics", 1, 7)
    assert (reply.client, reply.guesses, reply.stored) == (2, None, {})
    assert reply.seconds > 0


# What a client does not know ------------------------------------------------------------------------------------------


def test_true_labels_of_unlabelled_samples_are_not_among_the_clients_data():
    columns, labelled = np.array([3, 1, 2, 0]), np.array([True, False, True, False])
    method, context = FedRAN(M=4, rank=2), context_of(2)
    transport = InProcess.of(method, context, [[np.arange(4)]], columns, labelled, torch.zeros(4, 2))
    data = transport.everything
    assert data._labels.tolist() == [3, UNKNOWN, 2, UNKNOWN]
    client_data = data.client_data(0, 0)
    assert (client_data.labels.tolist(), len(client_data.unlabelled)) == ([3, 2], 2)
    assert [indices.tolist() for indices in data.samples(0, 0)] == [[0, 2], [1, 3]]
    assert columns.tolist() == [3, 1, 2, 0]  # the engine's own are as they were


@pytest.mark.parametrize("ssl", [True, False])
def test_other_true_labels_of_unlabelled_samples_change_the_count_of_right_guesses_only(ssl):
    method, context = FedRAN(M=12, rank=4, ssl=ssl, tau=-1.0), context_of(6)
    tasks = feature_tasks(0, [3], [[60, 45]])

    def learnt(shift: int):
        """With the labels of every other sample's classes turned round."""
        turned = []
        for Z, labels in tasks[0]:
            other = labels.clone()
            other[1::2] = (other[1::2] + shift) % 3
            turned.append((Z, other))

        def transport(method, context, shards, columns, labelled, inputs):
            labelled = labelled.copy()
            for indices in shards[0]:
                labelled[indices[1::2]] = False
            return InProcess.of(method, context, shards, columns, labelled, inputs)

        made = federation_of(method, context, [turned], transport=transport)
        uploads, exchange = [], made.transport.exchange

        def noted(*where):
            for reply in exchange(*where):
                uploads.append(reply.upload)
                yield reply

        made.transport.exchange = noted
        made.run(lambda _: None)
        return uploads, made.state.ledger.uploads

    (first, rows), (second, others) = learnt(0), learnt(1)
    assert all(same(*pair) for pair in zip(first, second, strict=True))
    for row, other in zip(rows, others, strict=True):
        assert (row.right != other.right) == ssl
        assert row.accepted == (30, 22)[row.client] * ssl
        changed = {"right", "client_seconds"}
        ours, theirs = (
            {name: value for name, value in dataclasses.asdict(each).items() if name not in changed}
            for each in (row, other)
        )
        assert ours == theirs


# What clients keep ----------------------------------------------------------------------------------------------------


class Keeping(CountingClient):
    """Counts its own turns in what it keeps, and keeps as many bytes as its number and the round say."""

    def update(self, client_data, broadcast, state):
        assert all(name in ("turns.all", "images.a", "images.b") for name in state)
        turns = int(state["turns.all"]) if state else 0
        self.log.append(("turn", client_data.client, turns))
        round_ = int(broadcast["round"])
        kept = {
            "turns.all": torch.tensor(turns + 1),
            "images.a": torch.full((10 * client_data.client + round_,), client_data.client, dtype=torch.uint8),
            "images.b": torch.zeros(1 - round_, dtype=torch.int32),
        }
        return Message({"sum": client_data.inputs.sum(dim=0)}), MappingProxyType(kept)


def test_each_client_gets_back_what_it_returned_and_nobody_elses():
    made, log = federation(Keeping)
    made.run(lambda _: None)
    turns = [entry[1:] for entry in log if entry[0] == "turn"]
    assert turns == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0), (0, 3), (2, 1)]
    kept = made.transport.state_dict()
    assert {name: int(value) for name, value in kept.items() if "turns" in name} == {
        "0.turns.all": 4,
        "1.turns.all": 2,
        "2.turns.all": 2,
    }
    assert kept["2.images.a"].tolist() == [2] * 21


def test_storage_is_the_most_that_any_client_kept_after_any_turn_by_kind():
    """Round 1 of client 2: 21 bytes of "images.a"; "images.b" of 4 bytes beside 20 in round 0 is more."""
    made, _ = federation(Keeping)
    state = made.run(lambda _: None)
    assert state.client_storage_bytes == {"turns": 8, "images": 24}
    # Both of the same turn, of client 2 in round 0: 8 + 20 + 4 bytes, and 20 + 1 rows; 21 + 0 rows in round 1.
    assert (state.client_storage_max_bytes, state.client_samples_kept) == (32, 21)
    plain, _ = federation()
    nothing = plain.run(lambda _: None)
    assert nothing.client_storage_bytes == {}
    assert (nothing.client_storage_max_bytes, nothing.client_samples_kept) == (0, 0)


class Shifting(CountingClient):
    """Keeps a model in one round, images in the next."""

    def update(self, client_data, broadcast, state):
        kept = {"images.a": torch.zeros(5, 2)} if int(broadcast["round"]) else {"model.a": torch.zeros(7)}
        return Message({"sum": client_data.inputs.sum(dim=0)}), kept


def test_what_a_client_keeps_together_is_of_one_moment():
    made, _ = federation(Shifting)
    state = made.run(lambda _: None)
    assert state.client_storage_bytes == {"model": 28, "images": 40}
    assert state.client_storage_max_bytes == 40


def test_raw_samples_are_rows_of_images_features_and_inputs():
    one = torch.zeros(1)
    kept = {"images.3": one.expand(4, 1), "features.0": one.expand(2, 5), "inputs.1": one, "labels.3": one.expand(9)}
    assert samples_in(kept) == 4 + 2 + 1
    assert samples_in({"model.images": one, "imagesque.1": one}) == 0


def test_bytes_are_counted_by_what_stands_before_the_first_dot():
    state = {
        "images.3": torch.zeros(2, 5, dtype=torch.uint8),
        "images.4": torch.zeros(3),
        "model.body.w": torch.zeros(1),
    }
    assert stored_bytes({**state, "c": torch.zeros(2, dtype=torch.int16)}) == {"images": 22, "model": 4, "c": 4}


def test_states_are_part_of_a_checkpoint_and_a_resumed_run_goes_on_with_them():
    whole, log = federation(Keeping)
    saved = []
    whole.run(lambda done: saved.append(copy.deepcopy(done.save())))
    record, tensors = saved[0]
    assert {name for name in tensors if name.startswith("client.")} == {
        f"client.{k}.{name}" for k in (0, 1) for name in ("turns.all", "images.a", "images.b")
    }
    resumed, again = federation(Keeping)
    resumed.restore(json.loads(json.dumps(record)), tensors)
    state = resumed.run(lambda _: None)
    second = log.index(("start", 1))
    assert again == log[second:]
    assert state.client_storage_bytes == whole.state.client_storage_bytes
    assert state.client_storage_max_bytes == whole.state.client_storage_max_bytes
    assert state.client_samples_kept == whole.state.client_samples_kept
    ours, theirs = resumed.transport.state_dict(), whole.transport.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


class Forgetting(CountingClient):
    """Keeps something in even rounds, and nothing in odd ones."""

    def update(self, client_data, broadcast, state):
        self.log.append(("kept", client_data.client, list(state)))
        even = int(broadcast["round"]) % 2 == 0
        return Message({"sum": client_data.inputs.sum(dim=0)}), {"a": torch.zeros(3)} if even else {}


def test_a_client_that_returns_nothing_keeps_nothing():
    made, log = federation(Forgetting)
    made.run(lambda _: None)
    assert [entry[2] for entry in log if entry[0] == "kept"] == [[], [], ["a"], ["a"], [], [], ["a"], ["a"]]
    assert made.transport.state_dict() == {}
    assert made.state.client_storage_bytes == {"a": 12}


@pytest.mark.parametrize("tip", [UPDATED, Tip(route="sample")], ids=["with memory", "without"])
def test_a_method_returns_a_new_state_and_leaves_the_one_it_got(tip):
    """Of every stage of two tasks; a state that can't be written to would be told."""
    method = FedProTIP(training=FAST, frozen_stages=1, columns=8, tip=tip)
    context, tasks = tiny_context(), image_tasks(np.random.default_rng(0), [2, 2], [[9], [8]])
    server, client, state = method.server(context), method.client(context), {}
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        server.start_task(task)
        for round_ in range(server.rounds(task)):
            broadcast = server.broadcast(task, round_)
            before = {name: value.clone() for name, value in state.items()}
            states = {0: MappingProxyType(state)}
            upload = turn(client, image_shard(0, task.index, *clients[0]), broadcast, states, round_)
            assert state.keys() == before.keys()
            assert all(torch.equal(value, before[name]) for name, value in state.items())
            state = dict(states[0])
            server.absorb(0, upload)
            server.finish_round()
        server.finish_task()
    assert set(state) == ({"inputs.0", "inputs.1"} if tip is UPDATED else set())


class Viewing(CountingClient):
    """Keeps a view of a few rows of something large."""

    def update(self, client_data, broadcast, state):
        return super().update(client_data, broadcast, state)[0], {"images.a": torch.zeros(1000, 3)[:2]}


def test_a_view_that_a_client_keeps_does_not_keep_what_it_is_a_part_of():
    """What is reported as stored is what is held."""
    made, _ = federation(Viewing)
    state = made.run(lambda _: None)
    assert state.client_storage_bytes == {"images": 2 * 3 * 4}
    assert {value.untyped_storage().nbytes() for value in made.transport.state_dict().values()} == {2 * 3 * 4}


# Small turns ----------------------------------------------------------------------------------------------------------


def test_shards_are_the_clients_own_in_any_order_of_tasks():
    context = tiny_context()
    columns, images = np.array([0, 1, 2, UNKNOWN, 4, 5]), torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    holdings = [[np.array([4, 0]), np.array([1])], [np.array([5]), np.array([3, 2])]]
    data = NodeData(context, holdings, columns, images)
    for task, client in [(0, 0), (0, 1), (1, 1), (0, 0), (1, 0), (1, 1)]:
        client_data, held = data.client_data(task, client), holdings[task][client].tolist()
        known = [index for index in held if columns[index] != UNKNOWN]
        assert client_data.inputs.flatten().tolist() == known
        assert client_data.labels.tolist() == columns[known].tolist()
        assert client_data.unlabelled.flatten().tolist() == [index for index in held if index not in known]


class Counting(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def calls_of(clients: int) -> int:
    """What torch is asked to compute in a round of so many clients, and by the server once per round."""
    tasks = image_tasks(np.random.default_rng(0), [2], [[8] * clients])
    federation = federation_of(FedAvg(training=FAST), tiny_context(), tasks)
    with Counting() as counting:
        federation.run(lambda _: None)
    return counting.calls


def test_a_round_of_a_small_client_asks_for_few_operations():
    """Calls are counted, since seconds depend on what else the machine does. The bare step has 85."""
    assert (calls_of(6) - calls_of(2)) / 4 < 170
