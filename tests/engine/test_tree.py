"""A tree of aggregators: what it computes, counts, checks and keeps, against the flat run."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcl_bench.engine.exchange import Reply
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.validation import BadUpload
from fcl_bench.methods.averaging.fedavg import FedAvg
from fcl_bench.methods.averaging.fedewc import FedEWC
from fcl_bench.methods.closed_form.afl import AFL
from fcl_bench.methods.closed_form.air import AIR
from fcl_bench.methods.closed_form.centred_sketch import CentredSketch
from fcl_bench.methods.closed_form.ds_al import DSAL
from fcl_bench.methods.closed_form.fedklda import FedKLDA
from fcl_bench.methods.closed_form.fedlda import FedLDA
from fcl_bench.methods.closed_form.fedncm import FedNCM
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.closed_form.ranpac import RanPAC
from fcl_bench.methods.closed_form.stsa import STSA
from fcl_bench.options.faults.choices import Faulty, ListedFaults
from fcl_bench.options.tree.tree import level_sizes
from fcl_bench.training.knobs import Training
from tests.methods.harness import context_of
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import assert_resumes, same

#: Eleven clients, some without samples of a task: with a fan-in of 3, levels of 4 and 2 nodes.
SIZES = [[5, 4, 6, 3, 7, 5, 4, 6, 5, 4, 3], [4, 0, 5, 6, 3, 4, 0, 0, 5, 6, 4], [6, 5, 4, 3, 5, 0, 6, 4, 5, 3, 4]]
FAN_IN = 3
#: Three clients over two tasks, for what trains.
FEW = [[5, 0, 6], [4, 5, 3]]


def small_training(**knobs) -> Training:
    return Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none", **knobs)


#: Methods whose sums, or means, are the flat run's to rounding.
EXACT = {
    "stsa": STSA(M=10),
    "stsa, gcv": STSA(M=10, gamma="gcv"),
    "afl": AFL(),
    "afl, kept regularisers": AFL(ri=False, gamma=3.0),
    "afl, no regulariser": AFL(M=30, gamma=0.0, ridge=0.1),
    "afl, recursive": AFL(gamma=1.0, aggregation="recursive"),
    "air": AIR(M=10),
    "air, logits": AIR(M=10, correction="logits"),
    "ds_al": DSAL(M=10),
    "fedncm": FedNCM(),
    "fedlda": FedLDA(),
    "fedklda": FedKLDA(M=10),
    "ranpac": RanPAC(M=10, ridge="held_out"),
    "fedran, all directions": FedRAN(M=10, rank=10),
    "fedavg": FedAvg(training=small_training()),
    "fedavg, uniform": FedAvg(training=small_training(weighting="uniform")),
}


def run_of(method, fan_in=None, wire="float64", faults=None, drops=False, transport=None, sizes=SIZES):
    """The engine after its last task."""
    made = transport or InProcess.of
    reached = made if faults is None else lambda *parts: Faulty(made(*parts), faults, 0)
    if method.trains_network:
        context, tasks = tiny_context(wire=wire), image_tasks(np.random.default_rng(0), [2, 2, 2][: len(sizes)], sizes)
    else:
        context, tasks = context_of(6, wire=wire), feature_tasks(0, [2, 2, 2], sizes)
    found = federation_of(method, context, tasks, transport=reached, drops=drops, fan_in=fan_in)
    found.run(lambda _: None)
    return found


def apart(a, b) -> float:
    """Largest difference of two servers' models over their largest entry."""
    ours, theirs = a.server.model(), b.server.model()
    assert ours.keys() == theirs.keys()
    floats = [name for name in ours if ours[name].is_floating_point()]
    return max(float((ours[name] - theirs[name]).abs().max() / ours[name].abs().max().clamp_min(1)) for name in floats)


def rows_of(found):
    """uploads.csv without seconds."""
    return [dataclasses.replace(row, client_seconds=0.0) for row in found.state.ledger.uploads]


@pytest.mark.slow_cases("fedavg", "fedavg, uniform")
@pytest.mark.parametrize("method", EXACT.values(), ids=EXACT.keys())
def test_what_adds_up_is_the_flat_runs_to_rounding_and_every_row_of_a_client_is_the_same(method):
    flat, tree = run_of(method), run_of(method, FAN_IN)
    largest = 2e-6 if method.trains_network else 1e-9
    assert apart(flat, tree) <= largest
    assert rows_of(flat) == rows_of(tree)
    assert (flat.state.answers["correct"] == tree.state.answers["correct"]).all() or method.trains_network


@pytest.mark.slow_cases("fedavg")
@pytest.mark.parametrize(
    "method",
    [
        STSA(M=10),
        AFL(),
        FedLDA(),
        FedAvg(training=small_training()),
        FedRAN(M=10, rank=3),
        CentredSketch(M=10, rank=2),
    ],
    ids=lambda method: method.name,
)
def test_with_as_much_fan_in_as_clients_there_is_no_node_and_the_bits_are_the_flat_runs(method):
    flat, tree = run_of(method, wire="float32"), run_of(method, 11, wire="float32")
    assert same(flat.server.state_dict(), tree.server.state_dict())
    assert tree.exchange.report()["levels"] == []
    assert len(tree.exchange.tables()["nodes.csv"][1]) == 0


def test_the_tree_is_at_work_in_the_tests_above():
    """A method whose merge depends on the order is another one over the tree."""
    flat, tree = run_of(FedRAN(M=10, rank=3)), run_of(FedRAN(M=10, rank=3), FAN_IN)
    assert apart(flat, tree) > 1e-6


@given(st.integers(1, 10**7), st.integers(2, 300))
def test_levels_shrink_by_the_fan_in_until_the_server_has_no_more_children_than_that(clients, fan_in):
    sizes = level_sizes(clients, fan_in)
    for below, size in zip([clients, *sizes], sizes, strict=False):
        assert size == math.ceil(below / fan_in)
        assert below > fan_in
    assert [clients, *sizes][-1] <= fan_in


def plain_tree(holders, clients, fan_in):
    """Independent of the engine: per level, the set of nodes that some of `holders` are below."""
    levels, nodes, count = [], set(holders), clients
    while count > fan_in:
        nodes = {node // fan_in for node in nodes}
        count = math.ceil(count / fan_in)
        levels.append(nodes)
    return levels


@pytest.mark.parametrize("fan_in", [2, 3, 5])
def test_messages_and_bytes_of_every_level_are_those_on_paper(fan_in):
    """A node sends as much of STSA as a client does, with 8 bytes for the number of clients if there are several."""
    tree = run_of(STSA(M=10), fan_in)
    upload = 8 * (10 * 10 + 10 * 2)
    rows = {(row["task"], row["level"], row["node"]): row for row in named(tree)}
    for task, sizes in enumerate(SIZES):
        holders = [k for k, size in enumerate(sizes) if size]
        below = {(0, k): 1 for k in holders}
        for level, nodes in enumerate(plain_tree(holders, len(sizes), fan_in), start=1):
            for node in nodes:
                children = [k for (at, k) in below if at == level - 1 and k // fan_in == node]
                made_of = sum(below[level - 1, k] for k in children)
                below[level, node] = made_of
                row = rows.pop((task, level, node))
                assert (row["received"], row["sent"]) == (len(children), 1)
                assert row["up_bytes"] == upload + (8 if made_of > 1 else 0)
                assert row["down_bytes"] == 16  # the projection's seed, and two columns
    assert rows == {}


def named(tree):
    header, rows = tree.exchange.tables()["nodes.csv"]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_the_server_absorbs_no_more_than_its_children(monkeypatch):
    taken = []
    absorb = STSA.server_half.absorb
    monkeypatch.setattr(
        STSA.server_half, "absorb", lambda self, k, m: (taken.append((k, m.clients)), absorb(self, k, m))
    )
    run_of(STSA(M=10), FAN_IN)
    # Nodes 0 and 1 of the last level are above clients 0 to 8 and 9 and 10.
    assert taken == [(0, 9), (9, 2), (0, 6), (9, 2), (0, 8), (9, 2)]


def test_broadcasts_that_are_kept_go_to_a_node_once():
    """FedEWC sends the last task's model once: a node has it as soon as one client below it has had it."""
    method = FedEWC(training=small_training())
    flat, tree = run_of(method, sizes=FEW), run_of(method, 2, sizes=FEW)
    assert apart(flat, tree) <= 2e-6
    assert rows_of(flat) == rows_of(tree)
    received = {}
    for row in tree.state.ledger.uploads:
        if row.down_bytes:
            received.setdefault((row.task, row.round, row.client // 2), []).append(row.down_bytes)
    rows = {(row["task"], row["round"], row["node"]): row["down_bytes"] for row in named(tree)}
    assert rows == {where: min(sizes) for where, sizes in received.items()}
    # Client 1 is new in the second task, where its node has had what it keeps.
    assert any(max(sizes) > min(sizes) for sizes in received.values())


@pytest.mark.slow_cases("late-fedavg", "silent, gone-fedavg")
@pytest.mark.parametrize("method", [STSA(M=10), AFL(), FedAvg(training=small_training())], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "faults",
    [
        ListedFaults(silent=["0@0", "1@0", "2@0", "9@1", "10@1"], gone=["4@1"]),
        ListedFaults(late=["0@0", "5@0", "10@0", "3@1"]),
    ],
    ids=["silent, gone", "late"],
)
def test_faults_under_the_tree_are_those_of_the_flat_run(method, faults):
    flat, tree = run_of(method, faults=faults), run_of(method, FAN_IN, faults=faults)
    assert apart(flat, tree) <= (2e-6 if method.trains_network else 1e-9)
    assert rows_of(flat) == rows_of(tree)
    assert flat.state.absences == tree.state.absences
    # A late upload passes every node above its client as it is, when it arrives.
    rows = {(row["task"], row["round"], row["level"], row["node"]): row for row in named(tree)}
    if faults.late and not method.trains_network:
        assert rows[1, 0, 1, 0]["sent"] == 2
        assert rows[1, 0, 2, 0]["sent"] == rows[1, 0, 2, 1]["sent"] + 1 == 3
    if faults.silent:
        # Clients 0, 1 and 2 are all that node 0 has, and clients 9 and 10 all that the second half of the tree has.
        assert rows[0, 0, 1, 0]["sent"] == rows[1, 0, 2, 1]["sent"] == rows[1, 0, 2, 1]["down_bytes"] == 0


class Lying:
    """A transport in which one client's upload of the second task is bad."""

    def __init__(self, *parts, client=4, bad):
        self._inner, self._client, self._bad = InProcess.of(*parts), client, bad

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def exchange(self, present, broadcast):
        for reply in self._inner.exchange(present, broadcast):
            hostile = isinstance(reply, Reply) and (broadcast.task, reply.client) == (1, self._client)
            yield dataclasses.replace(reply, upload=self._bad(reply.upload)) if hostile else reply


def of_many(upload):
    return dataclasses.replace(upload, clients=1000)


def too_many_sums(upload):
    return upload.with_tensors({**upload, "C": 100 * upload["C"]})


def claims_merges(upload):
    return upload.with_tensors({**upload, "merges": torch.tensor([1e6, 0, 0, 1e9], dtype=torch.float64)})


@pytest.mark.parametrize(
    ("method", "bad", "said"),
    [
        (STSA(M=10), of_many, "clients=1000"),
        (STSA(M=10), too_many_sums, "C "),
        (FedRAN(M=10, rank=10), claims_merges, "merges is what a node of a tree adds"),
    ],
    ids=["clients", "sums", "merges"],
)
def test_a_bad_upload_is_found_by_its_node_and_left_out_alone(method, bad, said, caplog):
    def lying(*parts):
        return Lying(*parts, bad=bad)

    with pytest.raises(BadUpload, match=f"client 4's upload in task 1, round 0.*{said}"):
        run_of(method, FAN_IN, transport=lying)
    flat = run_of(method, drops=True, transport=lying)
    tree = run_of(method, FAN_IN, drops=True, transport=lying)
    assert apart(flat, tree) <= 1e-9
    assert rows_of(flat) == rows_of(tree)
    assert tree.state.ledger.dropped() == [(4, 0)]
    row = next(row for row in named(tree) if (row["task"], row["level"], row["node"]) == (1, 1, 1))
    assert row["received"] == 2  # of clients 3, 4 and 5


def test_a_node_that_sends_what_no_server_expects_ends_the_run(monkeypatch):
    """What nodes send is checked as clients' uploads are, against the samples of all below them."""
    monkeypatch.setattr(
        STSA, "combination", lambda self, context: lambda uploads: of_many(dataclasses.replace(uploads[0]))
    )
    with pytest.raises(BadUpload, match="node 0 of level 1's upload in task 0, round 0.*clients=1000 .*expected: 3,"):
        run_of(STSA(M=10), FAN_IN)
    monkeypatch.setattr(
        FedNCM,
        "combination",
        lambda self, context: (
            lambda uploads: dataclasses.replace(
                uploads[0],
                tensors={**uploads[0], "n": uploads[0]["n"] + 1000},
                clients=sum(upload.clients for upload in uploads),
            )
        ),
    )
    with pytest.raises(BadUpload, match="node 0 of level 1's upload.*n counts 20.. samples.*at most the 15"):
        run_of(FedNCM(), FAN_IN)


@pytest.mark.parametrize("method", [FedRAN(M=10, rank=3), CentredSketch(M=10, rank=2)], ids=lambda m: m.name)
def test_a_run_over_the_tree_resumes_between_tasks_bit_for_bit(method):
    tasks = feature_tasks(0, [2, 2, 2], SIZES)
    assert_resumes(lambda: federation_of(method, context_of(6), tasks, fan_in=FAN_IN))


def test_a_run_over_the_tree_resumes_within_a_task_with_the_rows_of_its_nodes():
    tasks = image_tasks(np.random.default_rng(0), [2, 2], FEW)
    method = FedEWC(training=small_training())

    def made():
        return federation_of(method, tiny_context(), tasks, fan_in=2)

    whole, kept = made(), []
    whole.run(lambda run: kept.append(saved_copy(run)), every=1)
    assert len(kept) == 6
    for saved in (kept[0], kept[3]):
        resumed = made()
        resumed.restore(*saved)
        resumed.run(lambda _: None)
        assert same(whole.server.state_dict(), resumed.server.state_dict())
        plain = [{key: row[key] for key in row if "seconds" not in key} for row in named(whole)]
        assert plain == [{key: row[key] for key in row if "seconds" not in key} for row in named(resumed)]
        assert resumed.exchange.report()["path_seconds"] > saved[0]["tree"]["path_seconds"]


def saved_copy(run):
    """What a checkpoint would hold: tensors as they are now."""
    saved, tensors = run.save()
    return copy.deepcopy(saved), {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_narrow_wires_round_on_every_level(wire):
    """Each level's link rounds once more: so much, and not by orders more."""
    exact = run_of(STSA(M=10, gamma=1.0))
    flat, tree = run_of(STSA(M=10, gamma=1.0), wire=wire), run_of(STSA(M=10, gamma=1.0), FAN_IN, wire=wire)
    eps = torch.finfo(getattr(torch, wire)).eps
    one = apart_in_gram(exact, flat)
    more = apart_in_gram(exact, tree)
    assert 0 < one <= eps
    assert 0 < more <= 3 * eps


def apart_in_gram(a, b) -> float:
    ours, theirs = a.server.estimate.matrix, b.server.estimate.matrix
    return float((ours - theirs).abs().max() / ours.abs().max())
