"""What one upload reveals, by what its method declares."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from fcl_bench.engine.loop import Federation
from fcl_bench.engine.single_sample_leakage import Grouped, Groups, Leakage, revealed
from fcl_bench.methods.closed_form.fedncm import FedNCM, FedNCMClient
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.protocol.fields import (
    CLASSES,
    COLUMN,
    COUNT,
    MOMENTS,
    SQUARE,
    SUMS,
    Uploads,
    counts,
    gram_matrix,
    real,
)
from fcl_bench.protocol.message import Message
from tests.methods.harness import context_of
from tests.methods.test_revealed import small, tasks_of
from tests.methods.training_harness import federation_of, tiny_context
from tests.small_methods import architecture, trains_by_gradient


def of_one(groups: Groups, samples: int) -> Leakage:
    """What the upload of a client with so many samples reveals."""
    return revealed({0: Grouped.of(groups, np.arange(samples))})[0]


def test_nothing_of_the_groups_travels():
    upload = Message({"C": torch.ones(2, 2)}, groups={"C": torch.tensor([0, 1])})
    assert upload.nbytes == 16
    assert not upload.to_be_sent("", 0, 0).groups


def test_what_is_in_no_sum_and_what_is_retained_is_told_apart():
    which = torch.tensor([2, -1, 0, 0, 5, -1, 5, 7])
    found = of_one({SUMS: {"a": which, "b": None}, MOMENTS: {"c": which[:4]}}, samples=6)
    assert (found.sums, found.moments) == (2, 1)  # sums 2 and 7; 2 once more
    assert found.samples.tolist() == [0]
    alone = of_one({SUMS: {"b": None}, MOMENTS: {"c": torch.tensor([-1])}}, samples=1)
    assert (alone.sums, alone.moments, alone.samples.tolist()) == (1, 0, [0])
    none = of_one({SUMS: {"b": None, "a": which[:0]}, MOMENTS: {}}, samples=0)
    assert (none.sums, none.moments, len(none.samples)) == (0, 0, 0)


def test_groups_follow_from_the_declaration_where_the_client_says_nothing():
    """One sum per class in a field with columns for classes, else one sum; none where nothing leaks."""
    fields = {
        "C": real("M", "c", columns=CLASSES, one_sample=COLUMN),
        "G": gram_matrix("M", one_sample=SQUARE),
        "n": counts("c", one_sample=COUNT),
        "own": real("M", leaks=SUMS),
    }
    own, labels = torch.tensor([0, 0, -1]), torch.tensor([4, 7, 4])
    upload = Message({name: torch.zeros(1) for name in fields}, groups={"own": own})
    groups = Uploads({"stage": fields}).groups(upload, "stage", labels)
    assert groups.keys() == {SUMS, MOMENTS}
    assert groups[MOMENTS] == {"G": None}
    assert groups[SUMS].keys() == {"C", "own"}
    assert torch.equal(groups[SUMS]["C"], labels)
    assert torch.equal(groups[SUMS]["own"], own)


def test_ten_thousand_clients_cost_few_operations():
    """Work, not seconds: of an upload the engine looks at its samples once per field, whatever K and the classes."""
    groups = {SUMS: {"C": torch.arange(2000) % 50}, MOMENTS: {"G": None}}
    calls = []

    def count(frame, event, _):
        calls.append(event)

    sys.setprofile(count)
    of_one(groups, 2000)
    sys.setprofile(None)
    assert len(calls) < 250


def test_labels_that_clients_give_themselves_make_sums_larger():
    """Two samples of one direction, one without its label: with a pseudo-label the sum is no sample any more."""
    Z = torch.tensor([[4.0, 1, 0], [0, 1, 5], [0.1, 1, 5], [4.1, 1, 0], [4.2, 1, 0]], dtype=torch.float64)
    tasks = [[(Z, torch.tensor([0, 1, 1, 0, 0]))]]
    for ssl, alone in ((False, 2), (True, 0)):
        federation = federation_of(FedRAN(M=None, rank=2, ssl=ssl, tau=0.9), context_of(3), tasks)
        data = federation.transport.everything
        data._labels = torch.tensor([0, 1, -1, -1, -1])
        data._known = (data._labels >= 0).numpy()
        federation.run(lambda _: None)
        assert federation.state.ledger.labels()["accepted"] == (3 if ssl else 0)
        assert federation.state.ledger.single_samples()["revealed_samples"] == alone


class GuessingClient(FedNCMClient):
    def pseudo_labels(self, client_data):
        return torch.ones(len(client_data.unlabelled), dtype=torch.int64)


class Guessing(FedNCM):
    client_half = GuessingClient


def test_a_pseudo_labelled_sample_that_is_alone_is_told_by_its_own_number():
    """The client knows the labels of samples 0 and 2, class 0, and takes sample 1 to be of class 1."""
    tasks = [[(torch.rand(3, 4, dtype=torch.float64), torch.tensor([0, 1, 0]))]]
    federation = federation_of(Guessing(), context_of(4), tasks)
    data = federation.transport.everything
    data._labels = torch.tensor([0, -1, 0])
    data._known = (data._labels >= 0).numpy()
    federation.run(lambda _: None)
    assert federation.state.ledger.revealed.array.tolist() == [1]


@pytest.mark.slow_cases("fedprotip", "pilora")
@pytest.mark.parametrize("name", ["stsa_e", "fedprotip", "pilora"])
def test_a_resumed_run_counts_what_came_before(name):
    trained, vit = trains_by_gradient(name), architecture(name) == "vit"
    tasks = tasks_of(shape=(3, 8, 8) if trained else (6,))
    context = tiny_context(architecture="vit" if vit else "conv") if trained else context_of(6)
    saved = []

    def keep(federation: Federation) -> None:
        state, tensors = federation.save()
        saved.append((json.loads(json.dumps(state)), {key: value.clone() for key, value in tensors.items()}))

    whole = federation_of(small(name), context, tasks)
    whole.run(keep, every=1)
    assert len(saved) > 1
    for state, tensors in saved:
        resumed = federation_of(small(name), context, tasks)
        resumed.restore(state, tensors)
        resumed.run(lambda _: None)
        assert resumed.state.ledger.single_samples() == whole.state.ledger.single_samples()
        columns = ("one_sample_sums", "one_sample_moments")
        rows = [[getattr(row, c) for c in columns] for row in resumed.state.ledger.uploads]
        assert rows == [[getattr(row, c) for c in columns] for row in whole.state.ledger.uploads]
