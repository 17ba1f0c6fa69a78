"""Whole runs of methods that train, by the engine itself: their ends compared, and resumed from every round."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping

import torch

from fcl_bench.engine.federation import Federation
from fcl_bench.protocol.method import Method
from fcl_bench.protocol.problem import Problem
from tests.methods.training_harness import ImageTasks, federation_of, tiny_problem


def feature_problem(inputs: int = 6, **options) -> Problem:
    """Of class weights alone, on features of `inputs` numbers; `options` are those of `tiny_problem`."""
    return dataclasses.replace(tiny_problem(**options), inputs=inputs, network=None)


def learnt(method: Method, problem: Problem, tasks: ImageTasks, **options) -> Federation:
    """After all tasks; `options` are those of `federation_of`."""
    federation = federation_of(method, problem, tasks, **options)
    federation.run(lambda _: None)
    return federation


def model_of(federation: Federation) -> dict[str, torch.Tensor]:
    """The network of a method that trains, as it is now."""
    return {name: value.clone() for name, value in federation.server.network.state().items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """The same tensors under the same names, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_resumes(made: Callable[[], Federation], step: int = 1) -> tuple[Federation, list]:
    """That a run goes on from every `step`-th checkpoint, and from the last, to the same end, bit for bit.

    Args:
        made: the federation before its first task.
        step: 1: from every checkpoint, one after each round.

    Returns:
        The uninterrupted run, and all checkpoints.
    """
    saved: list = []
    whole = made()
    whole.run(lambda done: saved.append(copy.deepcopy(done.save())), every=1)
    assert len(saved) > 1
    for checkpoint in [*saved[:-1:step], saved[-1]]:
        resumed = made()
        resumed.restore(*copy.deepcopy(checkpoint))
        resumed.run(lambda _: None)
        assert same(resumed.server.state_dict(), whole.server.state_dict())
        assert same(resumed.transport.state_dict(), whole.transport.state_dict())
        assert resumed.server.report() == whole.server.report()
        assert (resumed.state.answers["correct"] == whole.state.answers["correct"]).all()
        assert resumed.state.client_storage_bytes == whole.state.client_storage_bytes
    return whole, saved
