"""Whole runs of methods that train, by the engine itself: their ends compared, and resumed from every round."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from fcl_bench.engine.loop import Federation
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.method import Method
from tests.methods.training_harness import ImageTasks, federation_of, tiny_context


def feature_context(inputs: int = 6, **options) -> Context:
    """Of class weights alone, on features of `inputs` numbers; `options` are those of `tiny_context`."""
    return dataclasses.replace(tiny_context(**options), inputs=inputs, network=None)


def learnt(method: Method, context: Context, tasks: ImageTasks, **options) -> Federation:
    """After all tasks; `options` are those of `federation_of`."""
    federation = federation_of(method, context, tasks, **options)
    federation.run(lambda _: None)
    return federation


def model_of(federation: Federation) -> dict[str, torch.Tensor]:
    """The network of a method that trains, as it is now."""
    return {name: value.clone() for name, value in federation.server.network.state().items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """The same tensors under the same names, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Reached(Exception):
    """Ends a run at a checkpoint."""


def assert_resumes(made: Callable[[], Federation], step: int = 1) -> tuple[Federation, list]:
    """That a run goes on from its first checkpoint to the same end, and from others to the same next one, bit for bit.

    From one to the next, and not each to the end: the whole costs three runs, whatever the number of rounds.

    Args:
        made: the federation before its first task.
        step: 1: from every checkpoint, one after each round; n: from every n-th, and the last.

    Returns:
        The uninterrupted run, and all checkpoints.
    """
    saved: list = []
    passed: list = []
    whole = made()

    def keep(done: Federation) -> None:
        saved.append(copy.deepcopy(done.save()))
        passed.append(copy.deepcopy(learnt_by(done)))

    whole.run(keep, every=1)
    assert len(saved) > 1
    for index in sorted({*range(0, len(saved), step), len(saved) - 1}):
        resumed = made()
        resumed.restore(*copy.deepcopy(saved[index]))
        if 0 < index < len(saved) - 1:
            with suppress(Reached):
                resumed.run(stop, every=1)
            assert_same(learnt_by(resumed), passed[index + 1])
        else:
            resumed.run(lambda _: None)
            assert_same(learnt_by(resumed), learnt_by(whole))
            assert resumed.server.report() == whole.server.report()
            assert computed(resumed) == computed(whole)
            assert (resumed.state.answers["correct"] == whole.state.answers["correct"]).all()
    return whole, saved


def computed(done: Federation) -> tuple[Counter[str], Counter[str]]:
    """What clients and the server counted."""
    return Counter(done.state.client_counts), Counter(done.state.server_counts)


def stop(_: Federation) -> None:
    raise Reached


def learnt_by(federation: Federation) -> tuple:
    """What a run has come to: tensors of the server and of the clients, how far it is, bytes that clients keep."""
    state = federation.state
    kept = state.client_storage_bytes
    return federation.server.state_dict(), federation.transport.state_dict(), state.tasks_done, state.rounds_done, kept


def assert_same(ours: tuple, theirs: tuple) -> None:
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])
    assert ours[2:] == theirs[2:]
