"""PILoRA: prototype-guided incremental LoRA (Guo, Zhu, Liu, Zhang, Liu, ECCV 2024).

Inside a frozen ViT, task t trains a low-rank update B_t A_t of the queries and of the values (`layers`, `rank`), which
is added to those of earlier tasks. It also trains a prototype w_c of each class, in place of class weights. With the
features z and the distances D_c = sqrt(||z - w_c||^2 / d), a client minimises, over the batch and q and v,

    CE(-D, y) + pull mean D_y + sparsity sum ||A_t||_1 + orthogonality sum_{i<t} sum |A_i A_t'|,

where -D is over the classes seen. The predicted class is argmin_c D_c. The server averages the updates by samples. It
weighs the clients' prototypes of a class by how near they are to the mean features m_j of the class, which every client
j with samples of it sends: with r_k = 1 / sum_j ||w_k - m_j||, scaled to 0..1 over the clients, the weights are
softmax(r / temperature).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import class_sums
from fcl_bench.methods.gradient.client import MODEL, GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.methods.transformers.low_rank import LowRank, LowRankMethod, factor_name, low_rank_layers
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, EACH, MEAN, SUMS, Schema, numbers, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Standard deviation of a new prototype's numbers.
_INITIAL = 0.1


class Prototypes(torch.nn.Module):
    """Features (n, d) to scores (n, c) that are negative distances: -D_c = -sqrt(||z - w_c||^2 / d).

    Args:
        weight: (c, d) the prototypes w_c.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        # In float32 at least, whatever the forward pass has. The square is not expanded, since that cancels.
        kind = torch.promote_types(features.dtype, self.weight.dtype)
        far = torch.cdist(features.to(kind), self.weight.to(kind), compute_mode="donot_use_mm_for_euclid_dist")
        return -far / features.shape[1] ** 0.5


class PrototypeNetwork(Network):
    """A network whose heads are prototypes."""

    def new_head(self, classes: int, seed: int) -> torch.nn.Module:
        drawn = torch.randn(classes, self.dimension, generator=torch.Generator().manual_seed(seed))
        return Prototypes(_INITIAL * drawn)

    def classifier(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The linear form: the nearest prototype has the largest z . w_c - ||w_c||^2 / 2."""
        weight = torch.cat(list(self.heads.parameters())).detach()
        return weight, -weight.square().sum(dim=1) / 2


#: The fields of an upload beside the model: (d, c) mean features of the task's classes, (c,) 1 for those it has.
MEANS, PRESENT = "class_means", "present"
#: Sums of distances that differ by less than this, relative to the larger, count as equal: it may be rounding.
_EQUAL = 1e-6


def overlap(layers: list[LowRank]) -> torch.Tensor:
    """sum_{i<t} sum |A_i A_t'|, t being the last task, of all parts of the layers."""
    total = torch.zeros(())
    for layer in layers:
        *old, last = range(layer.tasks)
        for part in layer.parts:
            before = torch.cat([layer.A[factor_name(part, task)] for task in old])
            total = (before @ layer.A[factor_name(part, last)].T).abs().sum() + total
    return total


def size(layers: list[LowRank]) -> torch.Tensor:
    """||A_t||_1, t being the last task, of all parts of the layers."""
    own = [layer.A[factor_name(part, layer.tasks - 1)] for layer in layers for part in layer.parts]
    return torch.stack([factor.abs().sum() for factor in own]).sum()


def prototype_weights(distances: torch.Tensor, temperature: float) -> torch.Tensor:
    """(K,) the weights of K clients' prototypes of one class; uniform if their distances are equal.

    Args:
        distances: (K,) 1 / r_k, the sum of each prototype's distances from all means.
        temperature: of the softmax.
    """
    least, most = distances.min(), distances.max()
    if most - least <= _EQUAL * most:
        return torch.full_like(distances, 1 / len(distances))
    # This is (r - min r) / (max r - min r), and also works if a prototype is the mean itself and r is infinite.
    near = least * (most - distances) / (distances * (most - least))
    return torch.softmax(torch.where(distances == least, 1.0, near) / temperature, dim=0)


class PILoRAObjective(Objective):
    """The loss. It also sums up, by class, the features that training sees.

    Attributes:
        sums: (d, c) sums of the features of each of the task's classes.
        counts: (c,) the number of features in each.
    """

    def __init__(self, heads: Heads, method: PILoRA, dimension: int, device: torch.device) -> None:
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        self._method = method
        self._columns = torch.tensor(heads.task, device=device)
        self.sums = torch.zeros(dimension, len(heads.task), device=device)
        self.counts = torch.zeros(len(heads.task), device=device)

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features, method = network.body(inputs), self._method
        if method.reweighting == "distances":
            self._note(features.detach(), labels)
        loss = self.score_loss(network.logits(features), labels, inputs)
        layers = list(low_rank_layers(network.body).values())
        if method.sparsity:
            loss = loss + method.sparsity * size(layers)
        if method.orthogonality and layers[0].tasks > 1:
            loss = loss + method.orthogonality * overlap(layers)
        return loss

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        loss = super().score_loss(scores, labels, inputs)
        if not self._method.pull:
            return loss
        competing, places = self.competing(scores, labels)
        return loss - self._method.pull * competing.gather(1, places.unsqueeze(1)).mean()

    def _note(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        places = torch.searchsorted(self._columns, labels)
        self.sums += class_sums(features.to(self.sums.dtype), places, len(self.counts))
        self.counts += torch.nn.functional.one_hot(places, len(self.counts)).sum(dim=0)

    def means(self) -> torch.Tensor:
        """(d, c) the means; 0 for a class without a sample."""
        return self.sums / self.counts.clamp(min=1)


class PILoRAClient(GradientClient):
    """Trains the task's updates and prototypes, and sends the mean features beside them."""

    method: PILoRA
    #: The objective of the turn at hand: every turn makes its own.
    _objective: PILoRAObjective

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        heads = Heads.from_message(broadcast)
        self._objective = PILoRAObjective(heads, self.method, self.network.dimension, self.context.device)
        return self._objective

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> dict[str, torch.Tensor]:
        if self.method.reweighting == "none":
            return {}
        return {MEANS: self._objective.means(), PRESENT: (self._objective.counts > 0).to(torch.uint8)}


class PILoRAServer(GradientServer):
    """Averages the updates, and weighs the prototypes by their distances to the clients' means."""

    method: PILoRA
    state = ("_means",)

    def __init__(self, method: PILoRA, context: Context) -> None:
        super().__init__(method, context)
        #: The uploads of the round at hand.
        self._sent: list[Message] = []
        self._means = 0

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        self.restored()

    def restored(self) -> None:
        """With `variant=published`, give the tested model the first task's update alone."""
        if self.method.variant == "published":
            for layer in low_rank_layers(self.network.body).values():
                layer.scales = dict.fromkeys(range(1, layer.tasks), 0.0)

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        if self.method.reweighting == "distances":
            names = [MEANS, PRESENT, *(name for name in self.sent if name.startswith("heads."))]
            self._sent.append(Message({name: upload[name].clone() for name in names}))
            self._means += int(upload[PRESENT].sum())

    def finish_round(self) -> None:
        if self._sent:
            for head, columns in enumerate(self.columns):
                if (name := f"heads.{head}.weight") in self.sent:
                    self._sums = {**self._sums, name: self._weight * self._reweighted(name, columns)}
        self._sent = []
        super().finish_round()

    def _reweighted(self, name: str, columns: tuple[int, ...]) -> torch.Tensor:
        """(c, d) the new prototypes of a head, in float64."""
        theirs = torch.stack([upload[name] for upload in self._sent]).double()
        means = torch.stack([upload[MEANS] for upload in self._sent]).double()
        present = torch.stack([upload[PRESENT] for upload in self._sent]).bool()
        mean = []
        for row, column in enumerate(columns):
            weights = theirs.new_full((len(theirs),), 1 / len(theirs))
            if column in self.tasks[-1]:
                place = self.tasks[-1].index(column)
                known = means[present[:, place], :, place]
                far = torch.cdist(theirs[:, row], known, compute_mode="donot_use_mm_for_euclid_dist").sum(dim=1)
                weights = prototype_weights(far, self.method.temperature)
            mean.append(weights @ theirs[:, row])
        return torch.stack(mean) if mean else theirs[0]

    def report(self) -> dict[str, Any]:
        """`class_means`: how many mean features of a client's class the server has received, over all rounds."""
        return {**super().report(), MEANS: self._means}

    def load_model(self, model: dict[str, torch.Tensor], tasks: Sequence[Task]) -> None:
        super().load_model(model, tasks)
        self.restored()


@dataclass
class PILoRA(LowRankMethod):
    name: ClassVar[str] = "pilora"
    search: ClassVar[Mapping[str, str]] = {"training.lr": "log(1e-6,1e-2)"}
    averaged_with: ClassVar[str] = "method.reweighting=none"
    client_half = PILoRAClient
    server_half = PILoRAServer
    network_class = PrototypeNetwork

    training: Training = field(
        default_factory=lambda: Training(
            rounds=30, epochs=10, optimizer="adam", lr=1e-5, rates={"heads": 2e-3}, weight_decay=1e-5, schedule="cosine"
        )
    )
    loss_classes: str = knob("seen", choices=("seen", "task"))
    layers: list[int] | None = knob(lambda: [0], least=0)
    pull: float = knob(0.001, least=0)
    sparsity: float = knob(0.01, least=0)
    orthogonality: float = knob(0.5, least=0)
    reweighting: str = knob("distances", choices=("distances", "none"))
    temperature: float = knob(0.2, above=0)
    variant: str = knob("working", choices=("working", "published"))

    @property
    def aggregation(self) -> str:  # type: ignore[override]
        """What clients say of their means decides how much each of their prototypes weighs."""
        return MEAN if self.reweighting == "none" else EACH

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        if self.reweighting == "none":
            return stages
        means = real("d", "c", columns=CLASSES, leaks=SUMS, zero_without=PRESENT)
        return {**stages, MODEL: {**stages[MODEL], MEANS: means, PRESENT: numbers("c", below=2)}}
