"""SGD on one client's samples: what gradient methods and first-stage adaptation share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from fcl_bench.data.images.batches import AUGMENTATIONS, Augment, Standardise, epoch_batches
from fcl_bench.environment import exact_kernels
from fcl_bench.errors import UserError, require_choice, require_count, require_positive
from fcl_bench.training.heads import Heads
from fcl_bench.training.network import Network

#: Images per forward pass where nothing is trained.
FORWARD_BATCH = {"cuda": 512, "cpu": 128}


@dataclass
class Training:
    """Knobs of federated training.

    Args:
        rounds: E, rounds of exchange per task.
        fraction: share of the clients that take part in a round, chosen at random.
        epochs: passes over its samples that a client makes in a round.
        batch_size: images per step.
        lr: step size of the first round.
        momentum: of SGD; clients start every round without it.
        weight_decay: of SGD.
        schedule: of the step size over a task's rounds: constant; cosine (from lr towards 0); step (times `decay` at
            each of `milestones`).
        milestones: rounds, from 0.
        decay: factor of a step.
        weighting: of the clients' models in the average: samples (their numbers), uniform.
        augment: none, crop (shifts by up to an eighth of the side), crop_flip.
        precision: auto (bfloat16 autocast on CUDA, float32 elsewhere), float32, bfloat16.
    """

    rounds: int = 50
    fraction: float = 1.0
    epochs: int = 5
    batch_size: int = 64
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 5e-4
    schedule: str = "constant"
    milestones: list[int] = field(default_factory=list)
    decay: float = 0.1
    weighting: str = "samples"
    augment: str = "crop_flip"
    precision: str = "auto"

    #: Where the user set these, for messages; no knob.
    _key = "training"

    def check(self, key: str) -> None:
        """Raise a `UserError` for impossible values; `key` is where the user set them ("method.training")."""
        self._key = key
        for name in ("rounds", "epochs"):
            require_count(f"{key}.{name}", getattr(self, name))
        require_count(f"{key}.batch_size", self.batch_size, least=2)
        require_positive(f"{key}.lr", self.lr)
        require_positive(f"{key}.decay", self.decay)
        require_positive(f"{key}.weight_decay", self.weight_decay, zero=True)
        if not 0 < self.fraction <= 1:
            raise UserError(f"{key}.fraction={self.fraction} is out of range", "above 0, at most 1")
        if not 0 <= self.momentum < 1:
            raise UserError(f"{key}.momentum={self.momentum} is out of range", "0 or more, below 1")
        require_choice(f"{key}.schedule", self.schedule, ["constant", "cosine", "step"])
        if self.schedule == "step" and not self.milestones:
            raise UserError(f"{key}.schedule=step has no milestones", f"such as {key}.milestones=[50,75]")
        for milestone in self.milestones:
            require_count(f"{key}.milestones", milestone)
        require_choice(f"{key}.weighting", self.weighting, ["samples", "uniform"])
        require_choice(f"{key}.augment", self.augment, AUGMENTATIONS)
        require_choice(f"{key}.precision", self.precision, ["auto", "float32", "bfloat16"])

    def diverged(self) -> UserError:
        """What to tell when a model is no longer finite."""
        return UserError(f"{self._key}.lr={self.lr:g}: training diverged", f"a smaller {self._key}.lr")

    def rate(self, round_: int) -> float:
        """The step size of a round of a task."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * round_ / self.rounds)) / 2
        if self.schedule == "step":
            return self.lr * self.decay ** sum(round_ >= milestone for milestone in self.milestones)
        return self.lr


class Objective:
    """What a client minimises and how; a method overrides what it does differently.

    Args:
        heads: the network's; None: logits are columns, and all compete.
        over: whose scores compete in the loss: see `Heads.competition`.
        rest: whether rows of classes that are not in the task stay as they are, in heads that train for others.
    """

    def __init__(self, heads: Heads | None = None, over: str = "seen", rest: bool = False) -> None:
        self._logits, self._position = (None, None) if heads is None else heads.competition(over)
        self._resting = {head: heads.resting_rows(head) for head in heads.reused} if heads and rest else {}

    def loss(self, network: Network, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of `labels` (b,) under the scores of standardised `images` (b, 3, size, size)."""
        scores = network(images)
        if self._logits is not None and self._position is not None:
            scores = scores[:, self._logits.to(scores.device)]
            labels = self._position.to(labels.device)[labels]
        return torch.nn.functional.cross_entropy(scores, labels)

    def direction(self, network: Network) -> None:
        """Change, in place, the gradients, weight decay included, before momentum and step."""
        for head, rows in self._resting.items():
            for parameter in network.heads[head].parameters():
                if parameter.grad is not None:
                    parameter.grad[rows] = 0

    def finish(self, network: Network) -> None:
        """After the last step of a round."""


class Trainer:
    """Runs a network on uint8 images (n, 3, h, w) that are on its device: training, features, scores.

    Args:
        training: the knobs.
        size, mean, std: what the network wants to see.
        device: where it is.
    """

    def __init__(
        self,
        training: Training,
        size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        device: torch.device,
    ) -> None:
        self.training = training
        self.standardise = Standardise(size, mean, std)
        self._augment = Augment(training.augment)
        self._device = device
        precision = training.precision
        if precision == "auto":
            precision = "bfloat16" if device.type == "cuda" else "float32"
        self._half = precision == "bfloat16"

    def train(
        self,
        network: Network,
        images: torch.Tensor,
        labels: torch.Tensor,
        rate: float,
        seed: int,
        objective: Objective,
    ) -> None:
        """One client's round: `training.epochs` passes of SGD over its samples, in place.

        Raises:
            UserError: the loss, or the model, is not finite.
        """
        knobs = self.training
        generator = torch.Generator().manual_seed(seed)
        weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimiser = torch.optim.SGD(weights, lr=rate, momentum=knobs.momentum)
        # Batch norm has no statistics of a single image; its running ones serve.
        network.train(len(images) > 1)
        loss = torch.zeros((), device=self._device)
        with self._reproducible(seed):
            for _ in range(knobs.epochs):
                for chosen in epoch_batches(len(images), knobs.batch_size, generator):
                    chosen = chosen.to(self._device, non_blocking=True)
                    batch = self.standardise(self._augment(images[chosen], generator))
                    optimiser.zero_grad(set_to_none=True)
                    with self.autocast():
                        loss = objective.loss(network, batch, labels[chosen])
                    loss.backward()
                    loss = loss.detach()
                    add_weight_decay(weights, knobs.weight_decay)
                    objective.direction(network)
                    optimiser.step()
        objective.finish(network)
        if not all(bool(torch.isfinite(value).all()) for value in [loss, *network.changing().values()]):
            raise knobs.diverged()

    @torch.inference_mode()
    def features(self, network: Network, images: torch.Tensor) -> torch.Tensor:
        """Features (n, d) in float32, in evaluation mode."""
        network.eval()
        parts = []
        with exact_kernels(), self.autocast():
            for batch in images.split(FORWARD_BATCH.get(self._device.type, 128)):
                parts.append(network.body(self.standardise(batch)).float())
        return torch.cat(parts)

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of forward passes."""
        return torch.autocast(self._device.type, torch.bfloat16) if self._half else nullcontext()

    @contextmanager
    def _reproducible(self, seed: int) -> Iterator[None]:
        """Draws inside the network (dropout) follow from the seed; nobody else's are changed."""
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), exact_kernels():
            torch.manual_seed(seed)
            yield


def add_weight_decay(weights: list[torch.nn.Parameter], weight_decay: float) -> None:
    """gradient += weight_decay * weight, as torch's own SGD does it, but before a method sees the gradients."""
    if not weight_decay:
        return
    pairs = [(weight.grad, weight.data) for weight in weights if weight.grad is not None]
    if pairs:
        torch._foreach_add_([grad for grad, _ in pairs], [data for _, data in pairs], alpha=weight_decay)


def average(sums: dict[str, torch.Tensor], total: float) -> dict[str, torch.Tensor]:
    """The weighted mean in float32 of a sum of models that was kept in float64."""
    return {name: (value / total).float() for name, value in sums.items()}
