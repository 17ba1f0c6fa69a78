"""What a client minimises, and how it steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fcl_bench.training.network import Heads, Network


class Objective:
    """What a client minimises and how; a method overrides what it does differently.

    Args:
        heads: the network's; None: logits are columns, and all compete.
        over: whose scores compete in the loss: see `Heads.competition`.
        rest: whether rows of classes that are not in the task stay as they are, in heads that train for others.

    Attributes:
        frozen_rows: those rows (see `Heads.frozen_rows`).
    """

    def __init__(self, heads: Heads | None = None, over: str = "seen", rest: bool = False) -> None:
        self._logits, self._position = (None, None) if heads is None else heads.competition(over)
        self.frozen_rows = heads.frozen_rows if heads and rest else {}

    def loss(self, network: Network, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of a batch; overridden where it looks at more than logits (features, made-up samples).

        Args:
            inputs: (b, ...) what the network sees: standardised images, or features.
            labels: (b,) their columns.
        """
        return self.score_loss(network(inputs), labels, inputs)

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The mean loss as a function of the logits `scores` (b, L): cross-entropy over those that compete.

        A method that adds a term on the logits overrides it; a teacher's logits are made of `inputs`.
        """
        return torch.nn.functional.cross_entropy(*self.competing(scores, labels))

    def competing(self, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, c) the logits that compete, of all the logits (b, L), and (b,) the place of each label among them."""
        if self._logits is None or self._position is None:
            return scores, labels
        logits, position = self._on(scores.device)
        return scores[:, logits], position[labels]

    def bystanders(self, sizes: Sequence[int]) -> list[bool]:
        """Whether no logit of a head competes in `Objective.score_loss`, for heads with `sizes` logits each."""
        if self._logits is None:
            return [False] * len(sizes)
        competes = torch.zeros(sum(sizes), dtype=torch.bool).index_fill_(0, self._logits.cpu(), True)
        return [not own.any() for own in competes.split(list(sizes))]

    def score_gradient(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The gradient of `score_loss` in the logits (b, L), in closed form: (softmax - one-hot) / b; 0 for bystanders.

        Training on features uses it (`LinearHeads`). It is never needed: without it, autograd differentiates an
        overridden `score_loss`. It is only used if no class derived from the one that defines it has another loss.
        """
        if self._logits is None or self._position is None:
            return _cross_entropy_gradient(scores, labels)
        chosen, position = self._on(scores.device)
        found = _cross_entropy_gradient(scores[:, chosen], position[labels])
        return torch.zeros_like(scores).index_copy_(1, chosen, found)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits that compete and the labels' places among them, copied to the device once."""
        assert self._logits is not None
        assert self._position is not None
        if self._logits.device != device:
            self._logits, self._position = self._logits.to(device), self._position.to(device)
        return self._logits, self._position

    def modify_gradients(self, network: Network) -> None:
        """Change, in place, the gradients, weight decay included, before momentum and step."""
        for parameter, rows in self.partly_frozen(network) if self.frozen_rows else ():
            if parameter.grad is not None:
                parameter.grad[rows] = 0

    def partly_frozen(self, network: Network) -> list[tuple[torch.nn.Parameter, list[int]]]:
        """The parameters that train but for `frozen_rows`, each with these rows."""
        own = network.training_parameters()
        return [(own[name], rows) for name, rows in self.frozen_rows.items() if name in own and rows]

    def proximal_term(self) -> tuple[Mapping[str, torch.Tensor], float, float | None] | None:
        """strength (w - centre) and clipping, if `modify_gradients` adds just that: for clients that train in batches.

        A class that overrides `modify_gradients` in another way leaves this out, and its clients are not batched.

        Returns:
            The centre by names of parameters that train, the strength, and the norm to which the whole gradient is
            clipped (None: no clipping). None: nothing is added.
        """
        return None

    def finish(self, network: Network) -> None:
        """After the last step of a round."""


class Distilled(Objective):
    """Distillation (Li and Hoiem, 2016): cross-entropy + strength KD (see `distillation`).

    Args:
        heads, over, rest: see `Objective`.
        teacher: scores the old classes; its logits are the first ones of the model that learns.
        strength: lambda, of the distillation.
        temperature: T.
    """

    def __init__(
        self, heads: Heads, over: str, rest: bool, teacher: Network, strength: float, temperature: float
    ) -> None:
        super().__init__(heads, over, rest)
        self._teacher, self._strength, self._temperature = teacher, strength, temperature

    def score_loss(self, scores: torch.Tensor, labels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            known = self._teacher(inputs)
        distilled = distillation(scores, known, self._temperature)
        return super().score_loss(scores, labels, inputs) + self._strength * distilled


def distillation(scores: torch.Tensor, known: torch.Tensor, temperature: float) -> torch.Tensor:
    """KD = -mean_x sum_c softmax(q'_c / T) log softmax(q_c / T), q (b, L) the scores, q' (b, C) the known first C."""
    wanted = (known / temperature).softmax(dim=1)
    return torch.nn.functional.cross_entropy(scores[:, : known.shape[1]] / temperature, wanted)


def _cross_entropy_gradient(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    gradient = torch.softmax(scores, dim=1)
    one = gradient.new_full((1, 1), -1.0).expand(len(labels), 1)
    return gradient.scatter_add_(1, labels.unsqueeze(1), one).div_(len(labels))
