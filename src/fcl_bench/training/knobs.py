"""Knobs of federated training, as `method.training` and `adapt.training` have them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fcl_bench.data.images.batches import AUGMENTATIONS
from fcl_bench.errors import UserError, require_choice, require_count, require_positive

CLIENT_OPTIMIZERS = ("sgd", "adam", "adamw")
SERVER_OPTIMIZERS = ("average", "momentum", "adam")


@dataclass
class Training:
    """Knobs of federated training.

    Args:
        rounds: E, rounds of exchange per task.
        fraction: share of the clients that take part in a round, chosen at random.
        epochs: passes over its samples that a client makes in a round.
        batch_size: samples per step.
        optimizer: of the clients: sgd, adam, adamw. They start every round without momentum.
        lr: step size of the first round.
        rates: step sizes of their own for the parameters whose names begin so ("heads": 0.1), on the same schedule.
        momentum: of SGD.
        weight_decay: added to the gradients; adamw takes it from the weights instead.
        schedule: of the step size over a task's rounds: constant; cosine (from lr towards 0); step (times `decay` at
            each of `milestones`).
        milestones: rounds, from 0.
        decay: factor of a step.
        weighting: of the clients' models in the average: samples (their numbers), uniform.
        server_optimizer: what the server makes of the average: average (takes it as it is, FedAvg), momentum (FedAvgM),
            adam (FedAdam; Reddi et al., 2021).
        server_lr: step size of the last two.
        server_momentum: of the last two.
        augment: none, crop (shifts by up to an eighth of the side), crop_flip.
        precision: auto (bfloat16 autocast on CUDA, float32 elsewhere), float32, bfloat16.
    """

    rounds: int = 50
    fraction: float = 1.0
    epochs: int = 5
    batch_size: int = 64
    optimizer: str = "sgd"
    lr: float = 0.01
    rates: dict[str, float] = field(default_factory=dict)
    momentum: float = 0.0
    weight_decay: float = 5e-4
    schedule: str = "constant"
    milestones: list[int] = field(default_factory=list)
    decay: float = 0.1
    weighting: str = "samples"
    server_optimizer: str = "average"
    server_lr: float = 1.0
    server_momentum: float = 0.9
    augment: str = "crop_flip"
    precision: str = "auto"

    def check(self, key: str) -> None:
        """Raise a `UserError` for impossible values; `key` is where the user set them ("method.training")."""
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
        require_choice(f"{key}.optimizer", self.optimizer, CLIENT_OPTIMIZERS)
        require_choice(f"{key}.server_optimizer", self.server_optimizer, SERVER_OPTIMIZERS)
        require_positive(f"{key}.server_lr", self.server_lr)
        if not 0 <= self.server_momentum < 1:
            raise UserError(f"{key}.server_momentum={self.server_momentum} is out of range", "0 or more, below 1")
        for prefix, rate in self.rates.items():
            require_positive(f"{key}.rates.{prefix}", rate)
        require_choice(f"{key}.weighting", self.weighting, ["samples", "uniform"])
        require_choice(f"{key}.augment", self.augment, AUGMENTATIONS)
        require_choice(f"{key}.precision", self.precision, ["auto", "float32", "bfloat16"])

    def diverged(self, key: str) -> UserError:
        """What to tell when a model is no longer finite; `key` as for `check`."""
        return UserError(f"{key}.lr={self.lr:g}: training diverged", f"a smaller {key}.lr")

    def rate(self, round_: int) -> float:
        """The step size of a round of a task, of the rounds in which models travel."""
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * round_ / self.rounds)) / 2
        if self.schedule == "step":
            return self.lr * self.decay ** sum(round_ >= milestone for milestone in self.milestones)
        return self.lr
