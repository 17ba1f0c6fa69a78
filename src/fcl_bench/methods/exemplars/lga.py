"""LGA (Dong et al., TPAMI 2023): GLFC with weights per earlier task, and an old model chosen by features.

Clients, exemplars, signals and gradients are GLFC's. With the weights w below, the old
model's columns O and its logits q', a client minimises

    L_cur = mean_{i,c} w_i BCE(sigma(q_ic), [c = y_i]) where there is no old model, else
    lam (L_cur + mean_{i,c} w_i BCE(sigma(q_ic), t_ic)),   t_ic = sigma(q'_ic) for c in O, else [c = y_i].

With `proxy: reconstruct` the server tests a model's heads on features around those of the reconstructed images, at a
radius r (`augmented_features`); the first `proxy_init` rounds of a task count as 0. After the first
task's rounds, in the stage `radius`, clients send n, sum phi and sum phi * phi of each class, from which r follows.

The samples that are learnt worst weigh most, task by task.
g_i = |sigma(q_i)[y_i] - 1|^(t / (t + 1)) in task t (|.| itself in the first), q_i the logits, y_i the label. A group is
the batch's samples that the client meets for the first time in this task, or those of the classes that it has learnt
and that first appeared in one earlier task.

    separate:    w_i = g_i / mean of g over i's group
    cumulative:  the same for new samples; for a learnt class of task j, sum_{s=j}^{t-1} g_i / mean of g over tasks <= s

and both are cut to [0.5, 5]. If the client has learnt no class yet, every weight is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fcl_bench.config import knob
from fcl_bench.linalg.gram import class_sums
from fcl_bench.linalg.tensors import add_weighted
from fcl_bench.methods.exemplars.glfc import GLFC, Compensated, GLFCClient, magnitudes
from fcl_bench.methods.exemplars.proxy import ProxyServer
from fcl_bench.methods.gradient.ccvr import moments_message, moments_schema
from fcl_bench.protocol.context import ClientData, Context, State, Task
from fcl_bench.protocol.fields import Schema
from fcl_bench.protocol.message import Message
from fcl_bench.randomness import derived_seed
from fcl_bench.training.knobs import Gaussian
from fcl_bench.training.network import Heads, Network

#: How the groups of earlier tasks are made.
GROUPS = ("separate", "cumulative")
#: The limits of a weight.
LEAST, MOST = 0.5, 5.0


def tempered(magnitude: torch.Tensor, task: int) -> torch.Tensor:
    """(b,) g of task `task`, from 0, of the magnitudes |sigma(q)[y] - 1|."""
    return magnitude.pow(task / (task + 1)) if task else magnitude


def balanced_weights(
    magnitude: torch.Tensor, labels: torch.Tensor, first: torch.Tensor, learnt: torch.Tensor, task: int, groups: str
) -> torch.Tensor:
    """(b,) w of the equations above.

    Args:
        magnitude: (b,) g.
        labels: (b,) columns.
        first: (C,) int64, the task in which each column first appeared.
        learnt: (C,) bool, the columns that the client has learnt in earlier tasks.
        groups: one of `GROUPS`.
    """
    if not bool(learnt.any()):
        return torch.ones_like(magnitude)
    group = torch.where(learnt, first, task)[labels]
    each = torch.arange(task + 1, device=group.device).unsqueeze(1)
    member = group == each
    if groups == "cumulative":
        member[:task] = group <= each[:task]
    member = member.to(magnitude.dtype)
    sums = member @ magnitude
    # A group without a sample, or without anything left to learn, has no mean to divide by.
    factor = torch.where(sums > 0, member.sum(dim=1) / sums, 0)
    return (magnitude * (factor @ member)).clamp(LEAST, MOST)


#: New features for each given one, and the share of the variance that noise may reach.
_COUNT, _SHARE = 5, 0.1
#: Draws of a noise that is too long, before it is shortened instead.
_ATTEMPTS = 10


#: What clients send of each class: n, sum phi, sum phi * phi, which add up over clients.
SENT = Gaussian(covariance="diagonal", least=1)


def radius_of(counts: torch.Tensor, sums: torch.Tensor, squares: torch.Tensor) -> float:
    """sqrt of the mean over classes of trace(cov) / d, cov with n - 1; of the classes with two samples or more.

    Args:
        counts: (c,) n, added up over clients.
        sums, squares: (d, c) sum phi and sum phi * phi, added up over clients.

    Returns:
        0 if no class has two samples.
    """
    known = counts > 1
    if not bool(known.any()):
        return 0.0
    n, total, second = counts[known].double()[:, None], sums.T[known].double(), squares.T[known].double()
    # Rounding on the wire may make it negative.
    variances = ((second - total.square() / n) / (n - 1)).mean(dim=1).clamp(min=0)
    return float(variances.mean().sqrt())


def augmented_features(
    features: torch.Tensor, labels: torch.Tensor, radius: float, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five features phi + radius e around each phi, e ~ N(0, diag var_c), |radius e|^2 at most a tenth of sum var_c.

    Noise that is longer is drawn again. If the radius is above sqrt(1/10), hardly any noise is short enough, and the
    published code draws for ever. Here the noise is shortened to the limit after ten draws; in many dimensions almost
    all short noise has that length.

    Args:
        features: (n, d) phi of the monitor's images.
        labels: (n,) their columns c; var_c (d,) is of the features of c, with n - 1, and 0 of a single one.
        radius: see `radius_of`.
        seed: of the noise.

    Returns:
        (5 n, d) in the features' type and (5 n,) labels, those of one phi after those of the other.
    """
    phi = features.double()
    _, which = labels.unique(return_inverse=True)
    classes = int(which.max()) + 1
    counts = torch.bincount(which, minlength=classes)[:, None]
    centred = phi - (class_sums(phi, which, classes).T / counts)[which]
    variances = class_sums(centred.square(), which, classes).T / (counts - 1).clamp(min=1)
    deviations, limits = variances.sqrt(), variances.sum(dim=1)
    each = which.repeat_interleave(_COUNT)
    scale, limit = radius * deviations[each], _SHARE * limits[each]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.full_like(scale, torch.inf)
    for _ in range(_ATTEMPTS):
        long = ~(noise.square().sum(dim=1) <= limit)
        if not bool(long.any()):
            break
        drawn = torch.randn(tuple(noise.shape), generator=generator, dtype=torch.float64).to(noise.device)
        noise = torch.where(long[:, None], scale * drawn, noise)
    lengths = noise.square().sum(dim=1)
    noise = noise * torch.where(lengths > limit, (limit / lengths).sqrt(), 1.0)[:, None]
    return (phi.repeat_interleave(_COUNT, dim=0) + noise).to(features.dtype), labels.repeat_interleave(_COUNT)


#: The stage after the first task's rounds in which clients send their classes' sums.
RADIUS = "radius"


class Balanced(Compensated):
    """The loss of the equations above.

    Args:
        heads, rest, learnt, old: see `Compensated`.
        groups: how the groups of earlier tasks are made.
        lam: weight of the loss where there is an old model.
    """

    def __init__(
        self, heads: Heads, rest: bool, learnt: torch.Tensor, old: Network | None, groups: str, lam: float
    ) -> None:
        super().__init__(heads, rest, learnt, old)
        self._task = len(heads.columns) - 1
        sizes = torch.tensor(heads.sizes)
        # A task's head has the columns that first appear in it.
        self._first = torch.arange(len(sizes)).repeat_interleave(sizes).to(learnt.device)
        self._groups, self._lam = groups, lam

    def weights(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        if self._learnt is None:
            return None
        magnitude = tempered(magnitudes(scores, labels), self._task)
        return balanced_weights(magnitude, labels, self._first, self._learnt, self._task, self._groups)

    def combined(self, weighted: torch.Tensor, distilled: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        both = distilled if weights is None else weights.unsqueeze(1) * distilled
        return self._lam * (weighted + both.mean())


class LGAClient(GLFCClient):
    """GLFC's client with another loss; it also sends sums of its features."""

    method: LGA

    def objective(self, client_data: ClientData, broadcast: Message, state: State) -> Balanced:
        heads, method = Heads.from_message(broadcast), self.method
        old, learnt = self.teacher(client_data, broadcast), self.learnt_columns(heads, state)
        return Balanced(heads, method.frozen_heads, learnt, old, method.groups, method.lam)

    def answer(self, client_data: ClientData, broadcast: Message, state: State) -> tuple[Message, State]:
        """In the stage `radius`: `counts` (c,) int32, `sums` (d, c) and `squares` (d, c), of the task's classes."""
        if broadcast.stage != RADIUS:
            return super().answer(client_data, broadcast, state)
        features = self.trainer.features(self.network, client_data.inputs)
        columns = Heads.from_message(broadcast).task
        return moments_message(features.double(), client_data.labels, columns, SENT), state


class LGAServer(ProxyServer):
    """Tests models on features around those of its reconstructed images.

    Attributes:
        radius: r, how far around.
        query_tasks: the tasks after whose rounds clients send it: the first, and others until anyone has answered.
    """

    method: LGA
    state = ("query_tasks", "_measured", "radius")

    def __init__(self, method: LGA, context: Context) -> None:
        super().__init__(method, context)
        self.radius = method.radius
        self.query_tasks, self._measured = {0}, False
        #: Of the stage `radius`: what clients sent so far, added up.
        self._totals: Mapping[str, torch.Tensor] = {}

    def start_task(self, task: Task) -> None:
        super().start_task(task)
        if not self._measured:
            self.query_tasks.add(task.index)

    def stages(self, task: Task) -> list[str]:
        """The method's, and that of the sums in tasks that are asked."""
        return [*super().stages(task), *([RADIUS] if task.index in self.query_tasks else [])]

    def broadcast(self, task: Task, round_: int) -> Message:
        self._totals = {}
        return super().broadcast(task, round_)

    def absorb_answer(self, client: int, upload: Message) -> None:
        if self.stage != RADIUS:
            super().absorb_answer(client, upload)
        else:
            self._totals = add_weighted(self._totals, upload.tensors, 1.0)

    def finish_stage(self) -> None:
        if self.stage != RADIUS:
            super().finish_stage()
        elif self._totals:
            self.radius, self._measured = radius_of(**self._totals), True

    def accuracy(self) -> float:
        """0 in a task's first rounds."""
        return 0.0 if self._round < self.method.proxy_init else self.accuracy_around()

    def accuracy_around(self) -> float:
        """The share of features around the monitor set's that the heads classify rightly."""
        seed = derived_seed(self.context.seed, "monitor", self.task, self._round)
        images = self._augment(self.images, torch.Generator().manual_seed(seed))
        features, labels = augmented_features(
            self.trainer.features(self.network, images),
            self.labels,
            self.radius,
            derived_seed(seed, "noise"),
        )
        with torch.inference_mode():
            right = self.network.logits(features).argmax(dim=1) == labels
        return float(right.double().mean())

    def report(self) -> dict[str, Any]:
        """`radius`: r."""
        return {**super().report(), "radius": self.radius}


@dataclass
class LGA(GLFC):
    name: ClassVar[str] = "lga"
    client_half = LGAClient
    proxy_half = LGAServer

    groups: str = knob("separate", choices=GROUPS)
    lam: float = knob(1.0, above=0)
    proxy_init: int = knob(6, least=0)  # without `of`, as `inversion`
    radius: float = knob(0.15, least=0)

    def uploads(self, context: Context) -> dict[str, Schema]:
        stages, sent = super().uploads(context), dict(moments_schema(SENT, dense=True))
        sent |= {name: replace(sent[name], zero_without="counts") for name in ("sums", "squares")}
        return {**stages, RADIUS: sent} if self.reconstructs else stages
