"""GLFC on three clients and three tasks: what its tests share."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from fcl_bench.methods.exemplars import glfc as module
from fcl_bench.methods.exemplars import proxy
from fcl_bench.methods.exemplars.glfc import GLFC, GLFCClient
from fcl_bench.methods.exemplars.proxy import Inversion
from fcl_bench.training.knobs import Training
from tests.methods.training_harness import federation_of, image_tasks, tiny_context

#: Client 1 misses the second task, client 2 comes with it.
SIZES = [[14, 9, 0], [12, 0, 11], [9, 8, 7]]
#: A second or so.
QUICK = Inversion(perturbation=2, iterations=2, images=2)


def training(**knobs) -> Training:
    small = {"rounds": 2, "epochs": 1, "batch_size": 8, "lr": 0.3, "momentum": 0.5, "weight_decay": 1e-3}
    return Training(**{**small, "augment": "none", **knobs})


def glfc(**knobs) -> GLFC:
    return GLFC(**{"training": training(), "memory": 8, "inversion": QUICK, **knobs})


def tasks_of(sizes=None):
    sizes = SIZES if sizes is None else sizes
    return image_tasks(np.random.default_rng(0), [2] * len(sizes), sizes)


def made(method: GLFC, sizes=None, tasks=None, **options):
    return federation_of(method, tiny_context(**options), tasks_of(sizes) if tasks is None else tasks)


def learnt(method: GLFC, sizes=None, after=lambda _: None, tasks=None, **options):
    federation = made(method, sizes, tasks, **options)
    federation.run(after)
    return federation


def state_of_client(federation, client: int) -> dict[str, torch.Tensor]:
    states = federation.transport.state_dict()
    return {name.partition(".")[2]: value for name, value in states.items() if name.startswith(f"{client}.")}


def classes(federation, client: int, kind: str = "learnt") -> list[int]:
    return state_of_client(federation, client)[f"classes.{kind}"].tolist()


@pytest.fixture
def short_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconstructions that hardly begin, for what does not ask how good they are."""
    monkeypatch.setattr(proxy, "reconstruct", partial(proxy.reconstruct, inner=1))


quickly = pytest.mark.usefixtures("short_descent")


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """The entropies of a run, in the order of turns."""
    told = iter(values)
    monkeypatch.setattr(module, "entropy", lambda _: torch.tensor(next(told)))


def turns(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What every round of the model began with, filled while a federation runs."""
    seen, objective = [], GLFCClient.objective

    def noted(self, client_data, broadcast, state):
        found = objective(self, client_data, broadcast, state)
        own = self.samples(client_data, broadcast, state)
        seen.append(
            {
                "at": (client_data.task, int(broadcast["round"]), client_data.client),
                "signal": bool(state["signal"]),
                "learnt": state["classes.learnt"].tolist(),
                "inputs": own.inputs.clone(),
                "labels": own.labels.clone(),
                "own": len(client_data.labels),
                "old": None if found._old is None else {n: v.clone() for n, v in found._old.state().items()},
            }
        )
        return found

    monkeypatch.setattr(GLFCClient, "objective", noted)
    return seen
