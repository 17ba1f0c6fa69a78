"""The engine over other transports: replies computed in any order, clients that are lost, data that stay away."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.exchange import Lost
from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.ledger import NOBODY_KNOWS, Upload
from fcl_bench.errors import UserError
from fcl_bench.execution.drift import FeatureDrift
from fcl_bench.methods.closed_form.afcl import AFCL
from fcl_bench.methods.closed_form.fedran import FedRAN
from fcl_bench.methods.projection.fedprotip import FedProTIP
from fcl_bench.training.knobs import Training
from tests.engine.counting import federation
from tests.methods.harness import context_of
from tests.methods.test_fedprotip_tip import UPDATED
from tests.methods.training_harness import feature_tasks, federation_of, image_tasks, tiny_context


class Delegating:
    """A transport that does what another one does."""

    complete = strangers = False

    def __init__(self, *parts) -> None:
        self.inner = InProcess.of(*parts)
        self.clients = self.inner.clients

    @property
    def everything(self):
        return self.inner.everything

    @property
    def raw(self):
        return self.inner.raw

    def samples(self, task):
        return self.inner.samples(task)

    def exchange(self, present, broadcast):
        return self.inner.exchange(present, broadcast)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, states):
        self.inner.load_state_dict(states)


class Unordered(Delegating):
    """Clients answer last to first; the replies come in the order asked for."""

    turns: list[int] = []  # noqa: RUF012

    def exchange(self, present, broadcast):
        replies = {}
        for reply in self.inner.exchange(list(reversed(present)), broadcast):
            self.turns.append(reply.client)
            replies[reply.client] = reply
        for client in present:
            yield replies[client]


def training() -> Training:
    return Training(rounds=2, epochs=1, batch_size=8, lr=0.05, augment="none")


CASES = {
    "fedran": lambda: (FedRAN(M=12, rank=3), context_of(6), feature_tasks(0, [2, 2], [[9, 4, 5], [5, 8, 3]])),
    "afcl": lambda: (AFCL(), context_of(6), feature_tasks(0, [2, 2], [[9, 4, 5], [5, 8, 3]])),
    "fedprotip": lambda: (
        FedProTIP(training=training(), frozen_stages=1, tip=UPDATED, columns=8),
        tiny_context(),
        image_tasks(np.random.default_rng(0), [2, 2], [[9, 4, 5], [5, 8, 0]]),
    ),
}


@pytest.mark.slow_cases("fedprotip")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_order_in_which_replies_are_computed_changes_no_bit(case):
    """FedRAN's merge, AFCL's registration and FedProTIP's bases go by the order in which replies are taken in."""
    states, ledgers = [], []
    Unordered.turns.clear()
    for transport in (InProcess.of, Unordered):
        made = federation_of(*case(), transport=transport)
        ledgers.append(made.run(lambda _: None).ledger)
        states.append({**made.server.state_dict(), **made.server.model(), **made.transport.state_dict()})
    assert Unordered.turns[:3] == [2, 1, 0]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    first, second = ([(row.task, row.round, row.client, row.up_bytes) for row in ledger.uploads] for ledger in ledgers)
    assert first == second


def test_replies_taken_in_another_order_would_change_bits():
    """So that the test above can fail: FedRAN's sequential merge."""

    class Turned(Delegating):
        def exchange(self, present, broadcast):
            return self.inner.exchange(list(reversed(present)), broadcast)

    sketches = []
    for transport in (InProcess.of, Turned):
        made = federation_of(*CASES["fedran"](), transport=transport)
        made.run(lambda _: None)
        sketches.append(made.server.state_dict()["sigma"])
    assert not torch.equal(*sketches)


class Losing(Delegating):
    """Client 2 is lost in the second round of task 1."""

    def exchange(self, present, broadcast):
        for reply in self.inner.exchange(present, broadcast):
            lost = (broadcast.task, broadcast.round, reply.client) == (1, 1, 2)
            yield Lost(2, "its connection closed") if lost else reply


def test_a_lost_client_ends_the_run_with_one_line():
    made, log = federation(transport=Losing)
    with pytest.raises(UserError) as told:
        made.run(lambda _: None)
    [line] = str(told.value).splitlines()
    assert line.startswith("client 2 was lost in task 1, round 1: its connection closed (")
    assert "goes on from the last checkpoint" in line
    assert [entry for entry in log if entry[0] == "absorb"][-1][1] == 0  # the others' are in
    assert made.state.tasks_done == 1


class Remote(Delegating):
    """The clients' data are elsewhere, and nobody has the truth."""

    everything = raw = None

    def exchange(self, present, broadcast):
        for reply in self.inner.exchange(present, broadcast):
            yield dataclasses.replace(reply, guesses=None, right=None)


def test_where_the_data_stay_away_audits_are_refused_in_one_line():
    audits = {"drift": FeatureDrift(3, 0, [[], []]), "bounds": FeatureDrift(3, 0, [[], []])}
    with pytest.raises(UserError) as told:
        federation(transport=Remote, audits=audits)
    [line] = str(told.value).splitlines()
    assert line.startswith("the audits drift, bounds need the clients' data, which stay where they are (")
    assert "drift=0" in line
    federation(audits=audits)


def half_labelled(transport):
    """Every other sample is labelled."""

    def made(method, context, shards, columns, labelled, inputs):
        labelled = labelled.copy()
        labelled[1::2] = False
        return transport(method, context, shards, columns, labelled, inputs)

    return made


def test_where_the_data_stay_away_right_guesses_are_not_counted_and_nothing_else_changes():
    tasks = feature_tasks(0, [2, 2], [[29, 14], [15, 28]])
    ledgers, states = [], []
    for transport in (InProcess.of, Remote):
        method = FedRAN(M=12, rank=3, ssl=True, tau=-1.0)
        made = federation_of(method, context_of(6), tasks, transport=half_labelled(transport))
        ledgers.append(made.run(lambda _: None).ledger)
        states.append(made.server.state_dict())
    seen, unseen = ([(row.accepted, row.right) for row in ledger.uploads] for ledger in ledgers)
    assert all(accepted >= right > 0 for accepted, right in seen)
    assert unseen == [(accepted, NOBODY_KNOWS) for accepted, _ in seen]
    assert (ledgers[0].labels()["right"], ledgers[1].labels()["right"]) == (sum(right for _, right in seen), None)
    right = [field.name for field in dataclasses.fields(Upload)].index("right")
    assert [row[right] for row in ledgers[0].values("")] == [right for _, right in seen]
    assert [row[right] for row in ledgers[1].values("")] == [""] * 4
    known = ("task", "round", "client", "samples", "labelled", "up_bytes", "down_bytes")
    first, second = ([[getattr(row, name) for name in known] for row in ledger.uploads] for ledger in ledgers)
    assert first == second
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_middleware_of_the_clients_is_given_to_a_transport_not_to_the_engine():
    """So the engine's own steps never see a broadcast arrive."""

    class Deaf(Middleware):
        def receive(self, message, client):
            assert "sum" in message
            return message

    made, _ = federation(middleware=[Deaf()])
    assert made.run(lambda _: None).tasks_done == 2
