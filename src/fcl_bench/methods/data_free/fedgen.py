"""FedGen: a generator of features, taught at the server by the clients' heads (Zhu, Hong, Zhou, ICML 2021).

Clients say once in each task how many samples of each class they have. After each round the server trains G(y, eps) on
    sum_k mean_i omega_k(y_i) CE(W_k G(y_i) + b_k, y_i) + lambda exp(-mean_ij |eps_i - eps_j|^2 |G_i - G_j|_1),
omega_k(y) = n_k(y) / sum_j n_j(y) over the round's participants k. From the next round on clients minimise
    CE(f(z), y) + beta_r KL(softmax(W G(y) + b) || softmax f(z)) + (b_g / b) alpha_r CE(W G(y') + b, y').
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy, kl_div

from fcl_bench.config import knob
from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.linalg.tensors import with_prefix
from fcl_bench.methods.data_free.generators.features import FeatureGenerator, KeptAdam, similarity
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.class_counts import COUNTS, COUNTS_SCHEMA, CountingClient, CountingServer
from fcl_bench.methods.gradient.client import MODEL
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import EACH, MEAN, Schema
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Prefix of the names of G's tensors.
_GENERATOR = "generator."
#: The least value of the weights alpha_r and beta_r.
_LEAST = 1e-4


@dataclass
class Generation:
    """`method.generator`: the network G, and how the server trains it, see conf/method/fedgen.yaml."""

    hidden: int | None = knob(None, least=1)
    noise: int = knob(32, least=1)
    steps: int = knob(50, least=1)
    lr: float = knob(3e-4, above=0)
    weight_decay: float = knob(1e-2, least=0)
    decay: float = knob(0.98, above=0, most=1)
    diversity: float = knob(1.0, least=0)


class Generated(Objective):
    """The clients' loss.

    Args:
        generator: G as broadcast, in evaluation mode.
        available: (q,) the columns that y' is drawn from.
        round_: r, of the task.
        steps: how many steps have the terms of G; later ones have the batch's own loss only.
        seed: of the noise and of y', a stream of its own.
    """

    def __init__(
        self,
        heads: Heads,
        method: FedGen,
        generator: FeatureGenerator,
        available: torch.Tensor,
        round_: int,
        steps: int,
        seed: int,
    ) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._generator, self._available = generator, available
        self._count, self._steps = method.generated, steps
        self._alpha = method.decayed(method.alpha, round_) * method.generated / method.training.batch_size
        self._beta = method.decayed(method.beta, round_)
        self._draws = torch.Generator().manual_seed(seed)

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = network(inputs)
        loss = self.score_loss(scores, labels, inputs)
        if not self._steps:
            return loss
        self._steps -= 1
        if self._beta:
            compute.count(forward=len(labels))
            with torch.no_grad():
                known, _ = self.competing(network.logits(self._made(labels)), labels)
            own, _ = self.competing(scores, labels)
            agreement = kl_div(own.float().log_softmax(dim=1), known.float().softmax(dim=1), reduction="batchmean")
            loss = loss + self._beta * agreement
        if self._alpha:
            chosen = torch.randint(len(self._available), (self._count,), generator=self._draws)
            drawn = self._available[chosen.to(self._available.device)]
            made = self._made(drawn)
            compute.count(trained=len(made))
            loss = loss + self._alpha * self.score_loss(network.logits(made), drawn, made)
        return loss

    @torch.no_grad()
    def _made(self, labels: torch.Tensor) -> torch.Tensor:
        return self._generator.draw(labels, self._draws)[0]


class FedGenClient(CountingClient):
    """Trains on its samples and on what G makes."""

    method: FedGen

    def __init__(self, method: FedGen, context: Context) -> None:
        super().__init__(method, context)
        self._generator = method.new_generator(context).eval()

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        values = with_prefix(broadcast, _GENERATOR)
        if not values:  # nothing is taught yet
            return super().objective(client_data, broadcast, state)
        self._generator.load(values)
        method, round_ = self.method, int(broadcast["round"])
        batches = epoch_batches(len(client_data.labels), method.training.batch_size, torch.Generator())
        return Generated(
            Heads.from_message(broadcast),
            method,
            self._generator,
            broadcast[f"labels.{client_data.task}"].long(),
            round_,
            method.generated_epochs * sum(1 for _ in batches),
            derived_seed(self.context.seed, "generated", client_data.task, round_, client_data.client),
        )


class FedGenServer(CountingServer):
    """Keeps G with Adam's moments and, within a round, each participant's uploaded heads.

    Attributes:
        generator: G.
        taught: index of the last task of whose classes G has learnt; -1: of none.
    """

    method: FedGen
    state = ("generator_tensors", "_adam", "taught")

    def __init__(self, method: FedGen, context: Context) -> None:
        super().__init__(method, context)
        self.generator = method.new_generator(context)
        self.taught = -1
        self._adam = KeptAdam()
        #: Of the round at hand: each participant's heads as uploaded, since no sum of them would teach.
        self._heads: dict[int, dict[str, torch.Tensor]] = {}

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if self.method.generates:
            self.generator.grow(task.columns_seen)

    def broadcast(self, task: Task, round_: int) -> Message:
        """G beside the model, and once the classes that somebody has samples of."""
        message = super().broadcast(task, round_)
        if self.stage != MODEL or self.taught != self.task:
            return message
        made = {_GENERATOR + name: value.clone() for name, value in self.generator.state().items()}
        held = torch.stack(list(self.counts.values())).sum(dim=0).nonzero().squeeze(1)
        labels = torch.tensor(self.tasks[-1], dtype=torch.int32, device=held.device)[held]
        name = f"labels.{task.index}"
        return Message({**message, **made, name: labels}, message.stage, cached={*message.cached, name})

    def absorb(self, client: int, upload: Message) -> None:
        super().absorb(client, upload)
        if self.stage == MODEL and self.method.generates:
            heads = {name: value for name, value in upload.items() if name.startswith("heads.")}
            self._heads[client] = {name: value.to(torch.float32, copy=True) for name, value in heads.items()}

    def finish_round(self) -> None:
        super().finish_round()
        self._heads = {}

    def server_step(self) -> None:
        """Adam's steps on L_teach + lambda L_div, by the heads of the round; the average plays no part in it."""
        if not self.method.generates:
            return
        knobs, columns = self.method.generator, torch.tensor(self.tasks[-1], device=self.context.device)
        held = torch.stack([self.counts[client] for client in self._heads])
        qualified = columns[(held > 1).any(dim=0)]
        if not len(qualified):
            return
        omega = torch.zeros(len(held), len(self.generator.classes), device=self.context.device)
        omega[:, columns] = shares(held).float()
        weights, biases = self._stacked("weight"), self._stacked("bias")
        competition = self.heads.competition(self.method.loss_classes)
        optimiser = self._adam.begin(self.generator, knobs.lr * knobs.decay**self._round, knobs.weight_decay)
        self.generator.train()
        for _ in range(knobs.steps):
            chosen = torch.randint(len(qualified), (self.method.training.batch_size,))
            labels = qualified[chosen.to(qualified.device)]
            made, noise = self.generator.draw(labels)
            compute.count(trained=len(made) * len(weights))
            loss = teaching_loss(made, labels, weights, biases, omega, competition)
            if knobs.diversity:
                loss = loss + knobs.diversity * similarity(noise, made)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        self._adam.keep(self.generator, optimiser)
        self.taught = self.task

    def _stacked(self, kind: str) -> torch.Tensor:
        """The `kind` of all heads of each participant, (K, L, d) or (K, L). A frozen head is the same for everyone."""
        own = self.network.state_dict()
        names = [f"heads.{head}.{kind}" for head in range(len(self.network.heads))]
        return torch.stack(
            [torch.cat([heads.get(name, own[name]) for name in names]) for heads in self._heads.values()]
        )

    def report(self) -> dict[str, Any]:
        """`generator_bytes`: what G adds to a broadcast."""
        sizes = [value.nbytes for value in self.generator.state().values()]
        return {**super().report(), **({"generator_bytes": sum(sizes)} if self.method.generates else {})}

    @property
    def generator_tensors(self) -> dict[str, torch.Tensor]:
        """G's tensors, for a checkpoint; setting them gives G its classes so far."""
        return dict(self.generator.state())

    @generator_tensors.setter
    def generator_tensors(self, saved: dict[str, torch.Tensor]) -> None:
        self.generator.load(saved)


def shares(held: torch.Tensor) -> torch.Tensor:
    """omega (K, c) of the counts `held` (K, c): each class's shares of the clients; 0 for a class that nobody has."""
    return held.double() / held.sum(dim=0).clamp(min=1)


def teaching_loss(
    made: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor,
    omega: torch.Tensor,
    competition: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """L_teach = sum_k mean_i omega_k(y_i) CE(W_k G_i + b_k, y_i), as much as the clients know of each class.

    Args:
        made: (b, d) G_i.
        labels: (b,) their columns y_i.
        weights, biases: (K, L, d) and (K, L), the clients' heads.
        omega: (K, C).
        competition: which logits compete: see `Heads.competition`.
    """
    K, L, d = weights.shape
    logits = (made @ weights.reshape(K * L, d).T).reshape(-1, K, L) + biases
    chosen, position = competition
    if chosen is not None and position is not None:
        logits, places = logits[..., chosen.to(logits.device)], position.to(labels.device)[labels]
    else:
        places = labels
    each = cross_entropy(logits.flatten(0, 1), places.repeat_interleave(K), reduction="none").reshape(-1, K)
    return (omega[:, labels].T * each).mean(dim=0).sum()


@dataclass
class FedGen(GradientMethod):
    name: ClassVar[str] = "fedgen"
    search: ClassVar[Mapping[str, str]] = {"alpha": "log(0.1,30)"}
    averaged_with: ClassVar[str] = "method.alpha=0 method.beta=0, which is method=fedavg"
    client_half = FedGenClient
    server_half = FedGenServer

    alpha: float = knob(10.0, least=0)
    beta: float = knob(1.0, least=0)
    decay: float = knob(0.98, above=0, most=1)
    generated: int = knob(32, least=1)
    generated_epochs: int = knob(20, least=1)
    generator: Generation = field(default_factory=Generation)

    @property
    def generates(self) -> bool:
        return self.alpha > 0 or self.beta > 0

    @property
    def aggregation(self) -> str:  # type: ignore[override]
        """G learns from each client's class weights."""
        return EACH if self.generates else MEAN

    def uploads(self, context: Context) -> dict[str, Schema]:
        return {**super().uploads(context), **({COUNTS: COUNTS_SCHEMA} if self.generates else {})}

    def stages(self, task: Task) -> list[str]:
        return [*([COUNTS] if self.generates else []), *super().stages(task)]

    def decayed(self, weight: float, round_: int) -> float:
        """alpha_r or beta_r."""
        return max(_LEAST, weight * self.decay**round_) if weight else 0.0

    def new_generator(self, context: Context) -> FeatureGenerator:
        """G before its first class, the same at every call."""
        d, knobs = self.start(context).dimension, self.generator
        seed = derived_seed(context.seed, "generator") % 2**62
        return FeatureGenerator(d, knobs.hidden or d, knobs.noise, seed).to(context.device)
