"""What the tests of LoRM share: a tiny transformer, and a client half that is watched."""

from __future__ import annotations

import numpy as np
import torch

from fcl_bench.methods.transformers.lorm import LoRM
from fcl_bench.methods.transformers.low_rank import low_rank_layers
from fcl_bench.protocol.context import Context
from fcl_bench.training.knobs import Training
from tests.methods.harness import turn
from tests.methods.training_harness import ImageTasks, image_shard, image_tasks, images_stream, tiny_context

QKV, FC2 = "body.blocks.1.attn.qkv", "body.blocks.1.mlp.fc2"
#: d = 16 features and inputs of qkv, 64 of fc2.
D, HIDDEN, RANK = 16, 64, 2


def lorm(rounds: int = 2, **knobs) -> LoRM:
    own = {name: knobs.pop(name) for name in ("epochs", "lr", "fraction", "augment") if name in knobs}
    training = {"epochs": 1, "lr": 0.02, "augment": "none", **own}
    made = Training(rounds=rounds, batch_size=16, optimizer="adamw", weight_decay=0.0, **training)
    return LoRM(made, **{"rank": RANK, "targets": ["qkv", "fc2"], "layers": [1], **knobs})


def setting(per_client: list[list[int]], classes: int = 2, **options) -> tuple[Context, ImageTasks]:
    """`options` are those of `tiny_context`."""
    tasks = image_tasks(np.random.default_rng(0), [classes] * len(per_client), per_client)
    return tiny_context(**{"width": 2, "architecture": "vit", "wire": "float64", **options}), tasks


class Watched:
    """A client half whose true inputs of each adapted layer, and features, are known after every turn."""

    def __init__(self, method: LoRM, context: Context) -> None:
        self.client = method.client(context)
        self.context = context

    def inputs(self, images: torch.Tensor) -> dict[str, np.ndarray]:
        """X (rows, i) under the network as it is."""
        seen: dict[str, torch.Tensor] = {}
        network = self.client.network.eval()
        hooks = [
            layer.register_forward_hook(lambda _, given, __, path=path: seen.update({path: given[0]}))
            for path, layer in low_rank_layers(network.body).items()
        ]
        with torch.no_grad():
            seen["heads"] = network.body(self.client.trainer.standardise(images))
        for hook in hooks:
            hook.remove()
        return {name: X.flatten(0, -2).double().numpy() for name, X in seen.items()}


def rounds_of(method: LoRM, context: Context, clients, rounds: int):
    """The first task by hand. Per round: the server before, each client's upload and true inputs, the server after."""
    server, watched = method.server(context), Watched(method, context)
    [task] = images_stream([clients])
    server.start_task(task)
    for round_ in range(rounds):
        before = {name: value.clone() for name, value in server.network.state().items()}
        broadcast = server.broadcast(task, round_)
        expected, uploads, inputs = server.schema(task, broadcast.stage), [], []
        for k, (images, labels) in enumerate(clients):
            upload = turn(watched.client, image_shard(k, 0, images, labels), broadcast, {}, round_)
            assert upload.keys() == expected.keys()
            assert all(tuple(upload[name].shape) == expected[name].shape for name in upload)
            inputs.append(watched.inputs(images))
            server.absorb(k, upload)
            uploads.append(upload)
        server.finish_round()
        after = {name: value.clone() for name, value in server.network.state().items()}
        yield before, uploads, inputs, after
