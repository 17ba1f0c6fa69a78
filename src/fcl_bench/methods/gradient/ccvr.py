"""A head for prediction that is retrained on Gaussian features of all classes so far (CCVR; Luo et al., NeurIPS 2021).

After a task's last round clients send, for each class, how many samples they have, the sum of their features and that
of their squares. These add up to the moments of everyone's samples together. The server keeps them for all classes,
draws the same number of features for each, and retrains a copy of the heads. The next task starts from the trained
heads, not from the copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, linear

from fcl_bench.data.images.batches import epoch_batches
from fcl_bench.errors import UserError
from fcl_bench.linalg.gram import class_sums, gram
from fcl_bench.protocol import compute
from fcl_bench.protocol.fields import CLASSES, MOMENTS, SUM, SUMS, Schema, counts, gram_matrix, real
from fcl_bench.protocol.message import Message
from fcl_bench.training.knobs import SGD, Gaussian
from fcl_bench.training.network import Heads, Network


@dataclass
class Moments:
    """The moments of one class.

    Attributes:
        count: n.
        total: (d,) the sum of its samples.
        second: (d, d) the sum of z z', or (d,) of z * z, which makes the covariance diagonal.
    """

    count: int
    total: torch.Tensor
    second: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """(d,)."""
        return self.total / self.count

    @property
    def covariance(self) -> torch.Tensor:
        """(d, d), or its diagonal (d,): (S - n m m') / (n - 1); 0 for a single sample."""
        if self.count < 2:
            return torch.zeros_like(self.second)
        mean = self.mean
        square = torch.outer(mean, mean) if self.second.ndim == 2 else mean.square()
        return (self.second - self.count * square) / (self.count - 1)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """(count, d) samples of the Gaussian with this mean and covariance; `generator` is on the CPU.

        Rounding may make the covariance indefinite, and fewer samples than features make it singular: variances that
        are not positive count as 0.
        """
        drawn = torch.randn((count, len(self.total)), generator=generator, dtype=torch.float64).to(self.total)
        covariance = self.covariance
        if covariance.ndim == 1:
            return self.mean + drawn * covariance.clamp(min=0).sqrt()
        variances, directions = torch.linalg.eigh(covariance)
        return self.mean + (drawn * variances.clamp(min=0).sqrt()) @ directions.T


#: Momentum of the steps on drawn features.
_MOMENTUM = 0.9


def moments_message(
    features: torch.Tensor, labels: torch.Tensor, columns: tuple[int, ...], knobs: Gaussian, dense: bool = False
) -> Message:
    """A client's upload: `counts` (c,), `sums` (d, c), and `squares` (d, c) or `second.<column>` (d, d) of a class.

    Args:
        features: (n, d) of its samples under the task's last model.
        labels: (n,) their columns.
        columns: (c,) of the task's classes, ascending.
        knobs: which classes it sends moments of, and of which kind.
        dense: whether second moments of all classes travel, with zeros for a class that it leaves out, so that they add
            up.
    """
    which = torch.searchsorted(torch.tensor(columns, device=labels.device), labels)
    found = torch.bincount(which, minlength=len(columns))
    reported = found >= knobs.least
    of_class = torch.where(reported[which], which, -1)
    features, which = features[reported[which]], which[reported[which]]
    fields = {"counts": (found * reported).to(torch.int32), "sums": class_sums(features, which, len(columns))}
    groups = {"sums": of_class}
    if knobs.covariance == "diagonal":
        fields["squares"] = class_sums(features.square(), which, len(columns))
        groups["squares"] = of_class
    else:
        held = list(range(len(columns))) if dense else reported.nonzero().squeeze(1).tolist()
        fields |= {f"second.{columns[place]}": gram(features[which == place]) for place in held}
        groups |= {f"second.{columns[place]}": torch.where(of_class == place, 0, -1) for place in held}
    return Message(fields, groups=groups)


def moments_schema(knobs: Gaussian, dense: bool) -> Schema:
    """The fields of such an upload."""
    both = {
        "counts": counts("c", combine=SUM),
        "sums": real("d", "c", combine=SUM, columns=CLASSES, leaks=SUMS),
    }
    if knobs.covariance == "diagonal":
        return {**both, "squares": real("d", "c", least=0, combine=SUM, columns=CLASSES, leaks=MOMENTS)}
    return {**both, "second.*": gram_matrix("d", optional=not dense, combine=SUM, leaks=MOMENTS)}


class CCVRHead:
    """The server's side: the moments of all classes so far, and the head that is made of them.

    Attributes:
        counts, totals, seconds: by column, the moments of the class (see `Moments`).
        weight, bias: (L, d) and (L,), the retrained outputs of all heads; None: before the task's moments are in.
    """

    state = ("counts", "totals", "seconds", "weight", "bias")

    def __init__(self, knobs: Gaussian, dimension: int, device: torch.device, dense: bool = False) -> None:
        self._knobs, self._dimension, self._device, self._dense = knobs, dimension, device, dense
        self.counts: dict[int, int] = {}
        self.totals: dict[int, torch.Tensor] = {}
        self.seconds: dict[int, torch.Tensor] = {}
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    @property
    def known(self) -> dict[int, Moments]:
        """By column, ascending, what is known of the class."""
        return {own: Moments(self.counts[own], self.totals[own], self.seconds[own]) for own in sorted(self.counts)}

    def matching(self, columns: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """What "second.*" stands for in a task of these classes."""
        square = torch.empty(self._dimension, self._dimension, device="meta")
        return {f"second.{column}": square for column in columns}

    def objection(self, upload: Message, columns: tuple[int, ...]) -> str:
        """How an upload's fields contradict each other; "" where they do not."""
        for place, column in enumerate(columns):
            count = int(upload["counts"][place])
            if count and self._knobs.covariance == "full" and f"second.{column}" not in upload:
                return f"it has samples of class {column} and no second moment of it"
            second = upload.get(f"second.{column}")
            moments = second is not None and (not self._dense or bool(second.any()))
            if not count and (moments or bool(upload["sums"][:, place].any())):
                return f"it has moments of class {column} and no sample of it"
            if 0 < count < self._knobs.least:
                return f"it tells of {count} samples of class {column}, fewer than {self._knobs.least}"
        return ""

    def absorb(self, upload: Message, columns: tuple[int, ...]) -> None:
        """Add an upload to what is known. A class that comes back is pooled with its earlier moments."""
        for place, column in enumerate(columns):
            if count := int(upload["counts"][place]):
                second = upload["squares"][:, place] if "squares" in upload else upload[f"second.{column}"]
                self.counts[column] = self.counts.get(column, 0) + count
                self.totals[column] = self.totals.get(column, 0) + upload["sums"][:, place]
                self.seconds[column] = self.seconds.get(column, 0) + second

    def draw(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (n, d) in float32, `samples` of each known class, and their places (n,) among these."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [known.draw(self._knobs.samples, generator).float() for known in self.known.values()]
        return torch.cat(drawn), torch.arange(len(drawn), device=self._device).repeat_interleave(self._knobs.samples)

    def retrain(self, network: Network, heads: Heads, seed: int) -> None:
        """Retrain a copy of the network's heads on features drawn anew; only known classes compete.

        Args:
            network: the network whose heads are copied; it does not change.
            heads: which classes they score.
            seed: the seed of the draws and of the order of the steps.
        """
        weight, bias = (value.clone() for value in network.classifier())
        self.weight, self.bias = weight, bias
        knobs, columns = self._knobs, sorted(self.counts)
        if not columns:
            return
        features, places = self.draw(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        weight.requires_grad_()
        bias.requires_grad_()
        optimiser = SGD([{"params": [weight, bias], "lr": knobs.lr}], _MOMENTUM)
        batches = [
            batch for _ in range(knobs.epochs) for batch in epoch_batches(len(places), knobs.batch_size, generator)
        ]
        for step, chosen in enumerate(batches):
            optimiser.param_groups[0]["lr"] = knobs.lr * (1 + math.cos(math.pi * step / len(batches))) / 2
            chosen = chosen.to(self._device)
            scores = heads.class_scores(linear(features[chosen], weight, bias))[:, columns]
            compute.count(trained=len(chosen))
            optimiser.zero_grad(set_to_none=True)
            cross_entropy(scores, places[chosen]).backward()
            optimiser.step()
        self.weight, self.bias = weight.detach(), bias.detach()
        if not bool(torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all()):
            raise UserError(
                f"method.gaussian.lr={knobs.lr:g}: retraining the heads diverged", "a smaller method.gaussian.lr"
            )
