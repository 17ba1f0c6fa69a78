"""FedSpace (Shenaj et al., CVPR Workshops 2023): class prototypes for clients that are out of step.

After each round client k sends the mean features p_kc of its classes c and its radius r_k, once measured as
sqrt(mean_c tr(Cov_kc) / d). The server takes, over the round's participants with n_k samples,

    p_c <- eta (sum_k n_k p_kc) / (sum_k n_k) + (1 - eta) p_c,   over the k that have class c,
    r = (sum_k n_k r_k) / (sum_k n_k),   w <- g (sum_k n_k w_k) / (sum_k n_k) + (1 - g) w.

With m drawn features v = p_c + r eps, eps ~ N(0, I), a client minimises CE(f(x) / T, y) + w_1 A + w_2 R:

    A = CE(f(v) / T, c), c uniform over the known classes that the client does not have now, f the class weights;
    R = -(1/N) sum_i 1/(N_i - 1) sum_{j != i, y_j = y_i} (s_ij - log(1 + sum_{j != i} exp s_ij)),  s = cosine / tau.

In R, i and j are of the N = b + m features of the batch and of v, with c uniform over all known classes; i is only of
classes that the client has now, N_i of them in its class. Prototypes and radius are constants in both terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy, normalize

from fcl_bench.config import knob
from fcl_bench.linalg.gram import class_sums
from fcl_bench.methods.gradient.base import ONLY_MEAN, GradientMethod
from fcl_bench.methods.gradient.client import MODEL, GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol import compute
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import CLASSES, SUM, SUMS, Schema, numbers, real
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Training
from fcl_bench.training.network import Heads, Network
from fcl_bench.training.objective import Objective

#: Fields of an upload beside the model: (d, c) n_k p_kc of the task's classes, (c,) n_k of those that the client has,
#: (1,) n_k r_k. The broadcast has (m, d) prototypes and (1,) the radius under the same names, and their (m,) columns.
PROTOTYPES, WEIGHTS, RADIUS, COLUMNS = "prototypes", "weights", "radius", "known"
#: What a client keeps: the columns (a,) of its classes so far, ascending, and r_k (1,) under `RADIUS`.
OWN = "classes"


class Prototyped(Objective):
    """The clients' loss.

    Args:
        own: the columns of the classes that the client has had, ascending.
        now: (a,) those that it has in this task.
        broadcast: has what is known of classes.
        contrasts: whether R is part of the loss.
        seed: of the draws.
    """

    def __init__(
        self, method: FedSpace, own: list[int], now: torch.Tensor, broadcast: Message, contrasts: bool, seed: int
    ) -> None:
        heads = Heads.from_message(broadcast)
        super().__init__(heads, method.loss_classes, method.frozen_heads)
        if method.loss_classes == "own":
            self._logits, self._position = heads.competition("task", tuple(own))
        self._method, self._now, self._contrasts = method, now, contrasts
        self._draws = torch.Generator().manual_seed(seed)
        self._known = COLUMNS in broadcast
        if self._known:
            self._columns = broadcast[COLUMNS].to(now)
            self._means, self._radius = broadcast[PROTOTYPES].to(now.device), float(broadcast[RADIUS])
            self._absent = ~torch.isin(self._columns, now)

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return super().score_loss(scores / self._method.temperature, labels, inputs)

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features, method = network.body(inputs), self._method
        loss = self.score_loss(network.logits(features), labels, inputs)
        if self._known and method.w_prototype and bool(self._absent.any()):
            drawn, made = self._draw(self._absent)
            compute.count(trained=len(made))
            loss = loss + method.w_prototype * cross_entropy(network.logits(made) / method.temperature, drawn)
        if self._known and self._contrasts:
            drawn, made = self._draw(torch.ones_like(self._absent))
            z, y = torch.cat([features, made]), torch.cat([labels, drawn])
            loss = loss + method.w_representation * contrast(z, y, self._now, method.tau)
        return loss

    def _draw(self, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns (m,) and the features (m, d) of draws from the known classes where `among` is true."""
        rows, count = among.nonzero().squeeze(1), self._method.training.batch_size
        chosen = rows[torch.randint(len(rows), (count,), generator=self._draws).to(rows.device)]
        noise = torch.randn((count, self._means.shape[1]), generator=self._draws).to(self._means)
        return self._columns[chosen], self._means[chosen] + self._radius * noise


def contrast(features: torch.Tensor, labels: torch.Tensor, now: torch.Tensor, tau: float) -> torch.Tensor:
    """R of features (N, d), drawn ones among them, with the columns `labels` (N,); anchors are of the columns `now`."""
    # At least float32, whatever the precision of the forward pass.
    z = normalize(features.to(torch.promote_types(features.dtype, torch.float32)))
    with torch.autocast(z.device.type, enabled=False):
        s = z @ z.T / tau
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    s = s.masked_fill(itself, 0.0)  # exp(0) is the 1 in the logarithm
    same = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~itself
    found = ((s - s.logsumexp(dim=1, keepdim=True)) * same).sum(dim=1) / same.sum(dim=1).clamp(min=1)
    return -found[torch.isin(labels, now)].sum() / len(z)


def moments(features: torch.Tensor, places: torch.Tensor, classes: int) -> tuple[torch.Tensor, ...]:
    """Of features (n, d) of the classes `places` (n,): counts (c,), means (d, c), r_k (1,), 0 without any two alike."""
    counts = torch.bincount(places, minlength=classes)
    means = class_sums(features, places, classes) / counts.clamp(min=1)
    squares = class_sums((features - means.T[places]).square(), places, classes).sum(dim=0)
    several = counts > 1
    variances = squares[several] / (counts[several] - 1) / features.shape[1]
    return counts, means, (variances.sum() / several.sum().clamp(min=1)).sqrt().reshape(1)


class FedSpaceClient(GradientClient):
    """Trains on what it draws around prototypes; keeps its classes so far, and its radius."""

    method: FedSpace
    #: Of the turn at hand, which makes its own: counts (c,) and mean features (d, c) of the task's classes.
    _means: tuple[torch.Tensor, torch.Tensor]

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Objective:
        method, client = self.method, client_data.client
        if not method.learns and method.temperature == 1 and method.loss_classes != "own":
            return super().objective(client_data, broadcast, state)
        own, now = own_classes(client_data, state).tolist(), client_data.labels.unique()
        moving = any(name.startswith("body.") for name in self.network.changing())
        seed = derived_seed(self.context.seed, "prototypes", client_data.task, int(broadcast["round"]), client)
        return Prototyped(method, own, now, broadcast, moving and method.w_representation > 0, seed)

    def remember(self, client_data: ClientData, broadcast: Message, state: State) -> State:
        kept = dict(state)
        if self.method.loss_classes == "own":
            kept[OWN] = own_classes(client_data, state).to(torch.int32)
        if self.method.learns:
            columns = torch.tensor(Heads.from_message(broadcast).task, device=client_data.labels.device)
            features = self.trainer.features(self.network, client_data.inputs).to(self.context.dtype)
            counts, means, radius = moments(features, torch.searchsorted(columns, client_data.labels), len(columns))
            self._means = counts, means
            if RADIUS not in kept or not bool(kept[RADIUS].any()):
                kept[RADIUS] = radius
        return kept

    def beside(self, client_data: ClientData, broadcast: Message, state: State, new: State) -> dict[str, torch.Tensor]:
        if not self.method.learns:
            return {}
        n, (counts, means) = self.speaks_for(client_data, new), self._means
        return {PROTOTYPES: n * means, WEIGHTS: (n * (counts > 0)).to(torch.int32), RADIUS: n * new[RADIUS]}


def own_classes(client_data: ClientData, state: State) -> torch.Tensor:
    """The columns (a,) of the classes that a client has had, those of this task among them, ascending."""
    now = client_data.labels.unique()
    return torch.cat([state[OWN].to(now), now]).unique() if OWN in state else now


class FedSpaceServer(GradientServer):
    """Keeps the prototypes and the radius, and mixes each round's mean with the last model.

    Attributes:
        prototypes: column -> (d,) p_c, in the statistics' type.
        radius: r of the last round.
    """

    method: FedSpace
    state = ("prototypes", "radius")

    def __init__(self, method: FedSpace, context: Context) -> None:
        super().__init__(method, context)
        self.prototypes: dict[int, torch.Tensor] = {}
        self.radius = 0.0
        self._totals: dict[str, torch.Tensor] = {}  # of the round at hand: sums of the fields
        self._samples = 0

    def broadcast(self, task: Task, round_: int) -> Message:
        message = super().broadcast(task, round_)
        if self.stage != MODEL or not self.prototypes:
            return message
        known = dict(sorted(self.prototypes.items()))
        columns, radius = torch.tensor(list(known), dtype=torch.int32), torch.tensor([self.radius], dtype=torch.float64)
        means = torch.stack(list(known.values())).float()
        return message.with_tensors({**message, COLUMNS: columns, PROTOTYPES: means, RADIUS: radius})

    def objection(self, upload: Message) -> str:
        if self.stage == MODEL and self.method.learns and int(upload[WEIGHTS].max()) > (upload.samples or 0):
            return "it weighs a class more than all of its samples"
        return super().objection(upload)

    def absorb_model(self, client: int, upload: Message) -> None:
        super().absorb_model(client, upload)
        if self.method.learns:
            for name in (PROTOTYPES, WEIGHTS, RADIUS):
                self._totals[name] = self._totals.get(name, 0) + upload[name].to(self.context.dtype)
            self._samples += upload.samples or 0

    def finish_round(self) -> None:
        super().finish_round()
        if self._samples:
            weights, eta = self._totals[WEIGHTS], self.method.ema
            for place in weights.nonzero().squeeze(1).tolist():
                column, mean = self.tasks[-1][place], self._totals[PROTOTYPES][:, place] / weights[place]
                old = self.prototypes.get(column)
                self.prototypes[column] = mean if old is None else eta * mean + (1 - eta) * old
            self.radius = float(self._totals[RADIUS]) / self._samples
        self._totals, self._samples = {}, 0

    def aggregated(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        g = self.method.global_weight
        return mean if g == 1 else {name: g * new + (1 - g) * self.sent[name].to(new) for name, new in mean.items()}


@dataclass
class FedSpace(GradientMethod):
    name: ClassVar[str] = "fedspace"
    aggregation: ClassVar[str] = ONLY_MEAN  # hostile prototypes would reach every client
    search: ClassVar[Mapping[str, str]] = {
        **{"training.lr": "log(1e-4,1e-2)", "training.momentum": "", "loss_classes": "own,seen,task"},
        "w_prototype": "log(1e-3,1)",
    }
    client_half = FedSpaceClient
    server_half = FedSpaceServer

    training: Training = field(default_factory=lambda: Training(epochs=1, optimizer="adam", lr=1e-3, weight_decay=2e-4))
    loss_classes: str = knob("own", choices=("own", "seen", "task"))
    w_prototype: float = knob(0.01, least=0)
    w_representation: float = knob(0.01, least=0)
    temperature: float = knob(0.1, above=0)
    tau: float = knob(1.0, above=0)
    ema: float = knob(0.1, above=0, most=1)
    global_weight: float = knob(0.5, above=0, most=1)

    @property
    def learns(self) -> bool:
        """Whether anything learns from prototypes; on features R has no gradient."""
        return self.w_prototype > 0 or (self.w_representation > 0 and self.trains_network)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages = super().uploads(context)
        beside = {
            PROTOTYPES: real("d", "c", combine=SUM, columns=CLASSES, leaks=SUMS, zero_without=WEIGHTS),
            WEIGHTS: numbers("c", combine=SUM),
            RADIUS: real(1, least=0, combine=SUM),
        }
        return {**stages, MODEL: {**stages[MODEL], **beside}} if self.learns else stages
