"""LANDER with knobs that take no time."""

from __future__ import annotations

import torch

from fcl_bench.methods.data_free.generators.anchored import Synthesis
from fcl_bench.methods.data_free.lander import LANDER
from fcl_bench.protocol.context import Task
from fcl_bench.protocol.message import Message
from tests.methods.classical_harness import training

SYNTHESIS = {"images": 20, "batch": 12, "warmup": 1, "batches": 2, "noise": 5, "g_steps": 2, "kd_steps": 2}


def lander(knobs=None, synthesis=None, **own) -> LANDER:
    return LANDER(
        training(**(knobs or {})),
        **{"anchor_size": 6, **own},
        synthesis=Synthesis(**{**SYNTHESIS, **(synthesis or {})}),
    )


def fed(server, task: Task, losses: list[list[float]], samples: list[int]):
    """Rounds with uploads that add one to every number; what came into each round, and the end."""
    came = []
    for round_, of_clients in enumerate(losses):
        broadcast = server.broadcast(task, round_)
        came.append({name: value.clone() for name, value in server.sent.items()})
        for client, loss in enumerate(of_clients):
            upload = {name: value.double() + 1 for name, value in server.sent.items()}
            upload["loss"] = torch.tensor([loss], dtype=torch.float64)
            assert server.schema(task, broadcast.stage).keys() == upload.keys()
            server.absorb(client, Message(upload, broadcast.stage, samples=samples[client]))
        server.finish_round()
    server.finish_task()
    return came, {name: value.clone() for name, value in server.network.state().items()}
