"""FedProTIP where clients miss rounds of the bases: the others' turns and references are as if they had none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fcl_bench.engine.in_process import InProcess
from fcl_bench.engine.loop import Federation
from fcl_bench.methods.projection.fedprotip import REFERENCES, FedProTIP
from fcl_bench.methods.projection.projected import BASES
from fcl_bench.methods.projection.task_identity import HeadRank, Tip
from fcl_bench.options.faults.choices import Faulty, ListedFaults, RandomFaults
from tests.methods.fedprotip_harness import fedprotip_of
from tests.methods.training_harness import federation_of, image_tasks, tiny_context
from tests.methods.whole_runs import assert_resumes, same

CLIENTS = 4
CONTEXT = replace(tiny_context(), clients=CLIENTS)
TASKS = image_tasks(np.random.default_rng(0), [2, 2, 2], [[12, 9, 8, 10], [9, 9, 11, 8], [8, 10, 9, 9]])
#: One round of the model, then one of the bases for each of four clients.
TURN = {client: 1 + client for client in range(CLIENTS)}


def sequential(**own) -> FedProTIP:
    """What `variant=published` sets, on a small network."""
    published = {"mass": "energy", "share_of": "inputs", "threshold": 0.8, "norms": "decay", "projected_decay": False}
    published |= {"projected_heads": False, "loss_classes": "task", "variant": "published", "augmented_bases": True}
    tip = Tip(rule="batches", references="updated")
    chosen = {"extension": "sequential", "head_rank": HeadRank(5, 6), "tip": tip, **published, **own}
    return fedprotip_of({"rounds": 1, "epochs": 1}, **chosen)


def failing(method: FedProTIP, *missed: tuple[int, int], late: bool = False) -> Callable[[], Federation]:
    """Makes a federation in which each (client, task) misses its turn in the bases."""
    entries = [f"{client}@{task}.{TURN[client]}" for client, task in missed]
    faults = ListedFaults(late=entries) if late else ListedFaults(silent=entries)
    return lambda: federation_of(
        method, CONTEXT, TASKS, transport=lambda *parts: Faulty(InProcess.of(*parts), faults, 0)
    )


def without_turns(method: FedProTIP, *missed: tuple[int, int]) -> Federation:
    """The end of a run without faults, in which the server asks none of these for bases or references."""
    federation = federation_of(method, CONTEXT, TASKS)
    server = federation.server
    choose = server.participants

    def participants(task, round_, available):
        out = {client for client, of in missed if of == task.index} if round_ else set()
        return [client for client in choose(task, round_, available) if client not in out]

    server.participants = participants
    federation.run(lambda _: None)
    return federation


MISSED = {
    "the first client, in the first task": [(0, 0)],
    "one in the middle": [(1, 0), (2, 1)],
    "two of a task": [(0, 1), (2, 1), (3, 2)],
    "all of a task": [(client, 1) for client in range(CLIENTS)],
}


@pytest.mark.slow_cases("all of a task", "one in the middle", "the first client, in the first task", "two of a task")
@pytest.mark.parametrize("missed", MISSED.values(), ids=MISSED.keys())
def test_a_run_with_silent_clients_resumes_and_is_one_in_which_they_have_no_turn(missed):
    method = sequential()
    whole, _ = assert_resumes(failing(method, *missed), step=3)
    other = without_turns(method, *missed)
    assert same(whole.server.state_dict(), other.server.state_dict())
    rows = [(row.task, row.round, row.client) for row in whole.state.ledger.uploads if row.up_bytes]
    # Whoever did not miss its turn had it, and none of the others made references.
    for task in range(len(TASKS)):
        there = [client for client in range(CLIENTS) if (client, task) not in missed]
        assert [row for row in rows if row[0] == task and 0 < row[1] <= CLIENTS] == [
            (task, TURN[client], client) for client in there
        ]
        assert [client for of, round_, client in rows if (of, round_) == (task, 1 + CLIENTS)] == there
    assert whole.state.absences["silent"] == len(missed)


@pytest.mark.slow
def test_the_first_client_that_answers_adds_the_first_clients_directions():
    server = without_turns(sequential(), (0, 0)).server
    silent = failing(sequential(), (0, 0))()
    silent.run(lambda _: None)
    assert silent.server.bases["basis.0.heads"].shape[1] == server.bases["basis.0.heads"].shape[1] == 5 + 2 * (6 // 3)


@pytest.mark.slow
def test_a_client_whose_bases_come_late_makes_no_references_of_that_task_in_it():
    """Nor are they appended; but it has kept its inputs, of which it makes references in later tasks."""
    late, silent = (failing(sequential(), (1, 0), late=late)() for late in (True, False))
    for federation in (late, silent):
        federation.run(lambda _: None)
    assert late.state.absences["late"] == 1
    own, others = (run.server.state_dict() for run in (late, silent))
    assert own.keys() - others.keys() == {'references."reference.1.0"'}
    assert same({name: own[name] for name in others}, others)
    asked = {(row.task, row.client) for row in late.state.ledger.uploads if row.stage == REFERENCES and row.up_bytes}
    assert {client for task, client in asked if task == 0} == {0, 2, 3}
    assert {client for task, client in asked if task == 1} == {0, 1, 2, 3}


@pytest.mark.slow_cases("learnt-sequential", "updated-sequential")
@pytest.mark.parametrize("extension", ["union", "sequential"])
@pytest.mark.parametrize("references", ["learnt", "updated"])
def test_a_client_without_bases_of_a_task_is_not_asked_for_its_references(extension, references):
    method = sequential(
        extension=extension, head_rank=None, tip=Tip(references=references), augmented_bases=False, variant="working"
    )
    stages = method.stages(federation_of(method, CONTEXT, TASKS).stream.tasks[0])
    assert stages.count(BASES) == stages.count(REFERENCES) == 1
    round_ = TURN[2] if extension == "sequential" else stages.index(BASES)
    faults = ListedFaults(silent=[f"2@0.{round_}"])
    federation = federation_of(method, CONTEXT, TASKS, transport=lambda *parts: Faulty(InProcess.of(*parts), faults, 0))
    federation.run(lambda _: None)
    known = {name for name in federation.server.references if name.startswith("reference.2.")}
    assert known == {"reference.2.1", "reference.2.2"}
    assert all(torch.isfinite(value).all() for value in federation.server.state_dict().values())


@pytest.mark.slow
def test_clients_that_fail_by_chance_are_silent_in_their_turns_too():
    """The default of `faults.min_clients` does not ask again until the only client of a round answers."""
    faults = RandomFaults(silent=0.5)
    whole, _ = assert_resumes(
        lambda: federation_of(
            sequential(), CONTEXT, TASKS, transport=lambda *parts: Faulty(InProcess.of(*parts), faults, 3)
        ),
        step=4,
    )
    turns = {(row.task, row.round) for row in whole.state.ledger.uploads if row.stage == BASES}
    answered = {(row.task, row.round) for row in whole.state.ledger.uploads if row.stage == BASES and row.up_bytes}
    assert 0 < len(answered) < len(turns) == len(TASKS) * CLIENTS
