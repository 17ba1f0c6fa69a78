"""A client's round of CODA-Prompt and of CPrompt, from the equations: attention by hand, in float64, torch's SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from fcl_bench.backbones.backbone import copies
from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from tests.methods.plain_training import made_tasks
from tests.methods.training_harness import ImageTasks, images_stream, learn_image_task, tiny_context

LAYERS = [1, 3]
#: Components of a task and layer, and rows of a prompt.
COUNT, LENGTH = 3, 4
#: The second client is not there in the first task.
TASKS = made_tasks([[9, 0], [6, 7]])
Values = Mapping[str, torch.Tensor]
#: (phi, phi_g, phi_o or None, the values, those of the broadcast) -> a term of the loss
Term = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Values, Values], torch.Tensor]


def plain_training(**knobs) -> Training:
    """SGD, whose steps rounding does not turn round, as it may Adam's."""
    usual = {"rounds": 2, "epochs": 2, "batch_size": 4, "optimizer": "sgd", "lr": 0.05, "momentum": 0.5}
    return Training(**{**usual, "weight_decay": 0.0, "augment": "none", **knobs})


def adam(**knobs) -> Training:
    return plain_training(optimizer="adam", lr=0.01, momentum=0.0, **knobs)


def recurring() -> ImageTasks:
    """A class of the first task comes back in the second, and the third brings nothing new."""
    first, second, third = made_tasks([[8, 6], [7, 6], [6, 8]])
    return [
        first,
        [(images, torch.where(torch.arange(len(labels)) % 2 == 0, 1, labels)) for images, labels in second],
        [(images, labels - 4) for images, labels in third],
    ]


def lively_context(seed: int = 0, wire: str = "float32", width: int = 2) -> Context:
    """Of a tiny transformer in which prompts matter: first weights of timm's are too small for that."""
    usual = tiny_context(8, width, seed, wire, architecture="vit")
    assert usual.network is not None
    body = usual.network.build()
    with torch.no_grad():
        for block in body.blocks:
            block.attn.qkv.weight.mul_(10)
            block.attn.proj.weight.mul_(10)
    return dataclasses.replace(usual, network=dataclasses.replace(usual.network, build=copies(body)))


class Oracle:
    """Of a tiny transformer.

    Args:
        context: its network.
        training: the knobs.
        orthogonality: lambda_o.
        softmax: of A.
        term: what CPrompt adds; None: CODA-Prompt.
    """

    def __init__(
        self,
        context: Context,
        training: Training,
        orthogonality: float = 0.0,
        softmax: bool = False,
        term: Term | None = None,
    ) -> None:
        assert context.network is not None
        self.vit = context.network.build().eval().double().requires_grad_(False)
        self.context, self.training = context, training
        self.orthogonality, self.softmax, self.term = orthogonality, softmax, term

    def features(self, values: Values, images: torch.Tensor, tasks: int) -> torch.Tensor:
        """phi of the model whose groups are those of the first tasks; 0 tasks: without a prompt."""
        with torch.no_grad():
            query = self._forward(images, {}) if tasks else None
        return self._forward(images, {} if query is None else self.prompts(values, query, tasks))

    def prompts(self, values: Values, query: torch.Tensor, tasks: int) -> dict[int, torch.Tensor]:
        found = {}
        for layer in LAYERS:
            A, K, P = (self.rows(values, kind, layer, tasks) for kind in "AKP")
            asked = query[:, None, :] * (A.softmax(dim=1) if self.softmax else A)
            alpha = torch.cosine_similarity(asked, K[None], dim=2)
            found[layer] = (alpha[:, :, None, None] * P).sum(dim=1)
        return found

    def rows(self, values: Values, kind: str, layer: int, tasks: int) -> torch.Tensor:
        return torch.cat([values[f"body.prompts.{kind}.{layer}_{task}"] for task in range(tasks)])

    def _forward(self, images: torch.Tensor, prompts: dict[int, torch.Tensor]) -> torch.Tensor:
        vit, batch = self.vit, len(images)
        x = vit._pos_embed(vit.patch_embed(images))
        for index, block in enumerate(vit.blocks):
            own, h = block.attn, block.norm1(x)
            query, key, value = own.qkv(h).chunk(3, dim=2)
            if index in prompts:
                half = prompts[index].shape[1] // 2
                key = torch.cat([prompts[index][:, :half], key], dim=1)
                value = torch.cat([prompts[index][:, half:], value], dim=1)
            parts = [
                (query[..., part] @ key[..., part].transpose(1, 2) / own.head_dim**0.5).softmax(dim=2)
                @ value[..., part]
                for part in (slice(i * own.head_dim, (i + 1) * own.head_dim) for i in range(own.num_heads))
            ]
            x = x + own.proj(torch.cat(parts, dim=2))
            x = x + block.mlp(block.norm2(x))
        assert x.shape[0] == batch
        return vit.norm(x)[:, 0]

    def penalty(self, values: Values, tasks: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in LAYERS:
            for kind in "AKP":
                X = self.rows(values, kind, layer, tasks).flatten(1)
                total = total + (X @ X.T - torch.eye(len(X))).square().mean()
        return self.orthogonality * total

    def loss(self, values: Values, sent: Values, images, labels, task: int) -> torch.Tensor:
        phi = self.features(values, images, task + 1)
        logits = phi @ values[f"heads.{task}.weight"].T + values[f"heads.{task}.bias"]
        first = sum(len(values[f"heads.{old}.bias"]) for old in range(task))
        loss = torch.nn.functional.cross_entropy(logits, labels - first)
        if self.orthogonality:
            loss = loss + self.penalty(values, task + 1)
        if self.term:
            theirs = self.features(sent, images, task + 1)
            earlier = self.features(sent, images, task) if task else None
            loss = loss + self.term(phi, theirs, earlier, values, sent)
        return loss

    def upload(self, broadcast: Message, images, labels, client: int, task: int) -> dict[str, torch.Tensor]:
        """What the client should send."""
        sent = {name: value.double() for name, value in broadcast.items() if name.startswith(("body.", "heads."))}
        values = {name: value.clone() for name, value in sent.items()}
        mine = [name for name in values if name.endswith(f"_{task}") or name.startswith(f"heads.{task}.")]
        for name in mine:
            values[name].requires_grad_()
        knobs, round_ = self.training, int(broadcast["round"])
        optimiser = torch.optim.SGD([values[name] for name in mine], lr=knobs.rate(round_), momentum=knobs.momentum)
        seed = derived_seed(self.context.seed, "training", task, round_, client)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(knobs.epochs):
            for chosen in epoch_batches(len(labels), knobs.batch_size, generator):
                optimiser.zero_grad()
                seen = images[chosen].double() / 127.5 - 1
                self.loss(values, sent, seen, labels[chosen], task).backward()
                optimiser.step()
        return {name: values[name].detach() for name in mine}


def exchanges(method, context: Context, tasks: ImageTasks) -> list[tuple[int, int, Message, Message]]:
    """(task, client, broadcast, upload) of a whole run."""
    server, states, found = method.server(context), {}, []
    for task, clients in zip(images_stream(tasks), tasks, strict=True):
        learn_image_task(
            method,
            context,
            server,
            task,
            clients,
            seen=lambda k, down, up, t=task.index: found.append((t, k, down, up)),
            states=states,
        )
    return found


def assert_uploads(oracle: Oracle, found, tasks: ImageTasks, atol: float = 1e-4) -> float:
    """That every upload is the oracle's; returns the largest change that a round made."""
    moved = 0.0
    for task, client, down, up in found:
        expected = oracle.upload(down, *tasks[task][client], client, task)
        assert expected.keys() == up.keys()
        for name, value in expected.items():
            torch.testing.assert_close(up[name].double(), value, atol=atol, rtol=0)
            moved = max(moved, float((down[name] - up[name]).abs().max()))
    return moved
