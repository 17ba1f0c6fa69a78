"""Client memory: a few samples of every class that a client has had, the most telling first, within a budget.

A list lies in the client's state as `images.<class>` (m, 3, h, w) in uint8, or `features.<class>` (m, d) in float32; a
class is a column of the label matrix. Lists are ordered, so that a list is shortened by leaving out its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from fcl_bench.config import knob
from fcl_bench.data.images.batches import Samples
from fcl_bench.errors import UserError
from fcl_bench.methods.gradient.base import GradientMethod
from fcl_bench.methods.gradient.client import GradientClient
from fcl_bench.methods.gradient.server import GradientServer
from fcl_bench.protocol.context import State, Task

_IMAGES, _FEATURES = "images.", "features."

#: (candidates (n, ...), their class, m) -> (min(m, n),) which of them to keep, the most telling first.
Ranking = Callable[[torch.Tensor, int, int], torch.Tensor]


def herd(features: torch.Tensor, count: int) -> torch.Tensor:
    """Herding (Rebuffi et al., 2017, Algorithm 4): the mean of the first i chosen is close to the mean, for every i.

    The i-th is p_i = argmin over x not chosen yet of || mu - (phi(x) + sum_{j<i} phi(p_j)) / i ||, ties to the lower
    index. The first m of a longer list are the list of m.

    Args:
        features: (n, d) phi of the candidates, usually of length 1; mu is their mean.
        count: m.

    Returns:
        (min(m, n),) indices in the order in which they were chosen.
    """
    phi = features.double()
    mu, chosen_sum = phi.mean(dim=0), phi.new_zeros(phi.shape[1])
    left = torch.ones(len(phi), dtype=torch.bool, device=phi.device)
    order: list[int] = []
    for i in range(1, min(count, len(phi)) + 1):
        distances = torch.linalg.vector_norm(mu - (phi + chosen_sum) / i, dim=1)
        best = int(torch.where(left, distances, torch.inf).argmin())
        order.append(best)
        left[best] = False
        chosen_sum = chosen_sum + phi[best]
    return torch.tensor(order, dtype=torch.int64, device=phi.device)


def random_order(count: int, of: int, seed: int) -> torch.Tensor:
    """(min(count, of),) indices at random; for one seed, the first m of a longer list are the list of m."""
    return torch.randperm(of, generator=torch.Generator().manual_seed(seed))[:count]


def lists_in(state: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The list of each class that the client has had, by ascending class; lists may be empty."""
    found = {
        int(name.removeprefix(kind)): value
        for kind in (_IMAGES, _FEATURES)
        for name, value in state.items()
        if name.startswith(kind)
    }
    return dict(sorted(found.items()))


def memory_size(state: Mapping[str, torch.Tensor]) -> int:
    """How many samples the memory holds."""
    return sum(map(len, lists_in(state).values()))


def remembered(
    state: State, inputs: torch.Tensor, labels: torch.Tensor, budget: int | None, ranking: Ranking | None = None
) -> State:
    """The state after a task: its classes have lists of its samples, and other lists are cut to the new share.

    Every class that the client has had has a share of m = floor(budget / classes). If a class comes back, its
    candidates are the retained samples, in their order, and then the new ones.

    Args:
        inputs: (n, ...) the task's samples.
        labels: (n,) their columns.
        budget: samples of all classes together; None: no limit.
        ranking: of a class's candidates; None: as they come.
    """
    lists, came = lists_in(state), labels.unique().tolist()
    for column in came:
        new = storable(inputs[labels == column])
        lists[column] = torch.cat([lists[column], new]) if column in lists else new
    share = None if budget is None else budget // max(len(lists), 1)
    stored = {}
    for column, candidates in lists.items():
        most = len(candidates) if share is None else share
        if ranking is not None and column in came:
            chosen = candidates[ranking(candidates, column, most).to(candidates.device)]
        else:
            chosen = candidates[:most]
        stored[f"{_IMAGES if chosen.dtype == torch.uint8 else _FEATURES}{column}"] = chosen
    return {**state, **stored}


def storable(inputs: torch.Tensor) -> torch.Tensor:
    """Samples as they are stored: images in uint8, features in float32, which is what a network sees of them."""
    return inputs if inputs.dtype == torch.uint8 else inputs.float()


def recalled(state: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """All of the memory with its labels, by ascending class, each list in its order; None if it is empty."""
    lists = {column: stored for column, stored in lists_in(state).items() if len(stored)}
    if not lists:
        return None
    labels = [torch.full((len(stored),), column, device=stored.device) for column, stored in lists.items()]
    return torch.cat(list(lists.values())), torch.cat(labels)


def with_memory(own: Samples, memory: tuple[torch.Tensor, torch.Tensor] | None) -> Samples:
    """A client's own samples and those of its memory, shuffled together; only its own if there is no memory."""
    if memory is None:
        return own
    inputs, labels = memory
    return Samples(torch.cat([storable(own.inputs), inputs]), torch.cat([own.labels, labels]))


#: The stage after a task's rounds in which clients choose what they keep.
EXEMPLARS = "exemplars"


class ExemplarClient(GradientClient):
    """Keeps exemplars."""

    method: ExemplarMethod

    def directions(self, samples: torch.Tensor) -> torch.Tensor:
        """(n, d) phi / ||phi|| of samples, in float64, under the network at hand."""
        return normalize(self.trainer.features(self.network, samples).double(), dim=1)

    def with_exemplars(self, state: State, inputs: torch.Tensor, labels: torch.Tensor) -> State:
        """The state with exemplars of these samples, by `herd`. Warn once if the budget leaves nothing."""
        budget = self.method.memory
        state = remembered(state, inputs, labels, budget, lambda own, _, count: herd(self.directions(own), count))
        if (classes := len(lists_in(state))) > budget:
            self._notices.tell(
                "too little",
                f"{self.method.name}: a client that may keep {budget} samples has had {classes} classes, and keeps"
                " nothing from now on (a larger method.memory)",
            )
        return state


class ExemplarServer(GradientServer):
    """Sends only the model in the stage in which exemplars are chosen."""

    def extra_broadcast(self) -> dict[str, torch.Tensor]:
        return {} if self.stage == EXEMPLARS else super().extra_broadcast()

    def may_return(self, task: Task, refused: int, round_: int) -> bool:
        """Nothing builds on the choice of exemplars."""
        return self.stages(task)[refused] == EXEMPLARS or super().may_return(task, refused, round_)


@dataclass
class ExemplarMethod(GradientMethod):
    """A method whose clients keep exemplars."""

    loss_classes: str = knob("seen", choices=("seen", "task"))
    memory: int = knob(2000, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_classes != "seen":
            raise UserError(
                "method.loss_classes=task: exemplars are of earlier tasks' classes", "method.loss_classes=seen"
            )
