"""The closed-form methods on a GPU agree with the CPU and resume bit for bit (run with: pytest -m gpu)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fcl_bench.engine.codec import decoded, encoded
from tests.methods.harness import context_of, draw_tasks, shard_of, stream_of, turn
from tests.methods.test_every_method import METHODS

pytestmark = pytest.mark.gpu


def classifier_on(device: str, method) -> torch.Tensor:
    tasks = draw_tasks(np.random.default_rng(0), 8, [3, 2], [[60, 5, 30], [20, 40, 1]])
    context = type(context_of(8))(**{**vars(context_of(8)), "device": torch.device(device)})
    server, client = method.server(context), method.client(context)
    for task, clients in zip(stream_of(tasks), tasks, strict=True):
        server.start_task(task)
        for round_ in range(server.rounds(task)):
            broadcast = server.broadcast(task, round_)
            for k, (Z, labels) in enumerate(clients):
                client_data = shard_of(k, task.index, Z, labels)
                there = type(client_data)(
                    k,
                    task.index,
                    *(t.to(context.device) for t in (client_data.inputs, client_data.labels, client_data.unlabelled)),
                )
                message = encoded(turn(client, there, broadcast), context.wire)
                server.absorb(k, decoded(message, context.dtype, context.device))
        server.finish_task()
    return server.model()["W"].cpu()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_gpu_agrees_with_the_cpu_and_with_itself(method):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    gpu, again, cpu = classifier_on("cuda", method), classifier_on("cuda", method), classifier_on("cpu", method)
    assert torch.equal(gpu, again)
    torch.testing.assert_close(gpu, cpu, rtol=1e-6, atol=1e-8 * float(cpu.abs().max()))
