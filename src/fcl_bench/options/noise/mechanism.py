"""What both halves know about noise in uploads of statistics: the norm bound of a sample, and the noise per field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fcl_bench.linalg.structure import NOISE_BOUND
from fcl_bench.protocol.fields import COUNT, SQUARE, Field, Schema
from fcl_bench.protocol.message import Message


@dataclass(frozen=True)
class DPMechanism:
    """Statistics of clipped samples, and the Gaussian noise that each client adds to its own.

    Attributes:
        clip: upper bound of |h|.
        summands: what each field sums.
        deviation: standard deviation of the noise in each number of a field; for a "square" it holds on the diagonal,
            and off the diagonal the deviation is 1/sqrt(2) of it.
        ridge: how many times the noise of a Gram matrix is added to its eigenvalues before a system is solved with it.
        shared: whether `deviation` is that of one client's share of the noise, so that only sums of uploads have all
            of the noise.
    """

    clip: float
    summands: Mapping[str, str]
    deviation: Mapping[str, float]
    ridge: float = 1.0
    shared: bool = False

    def edge(self, rows: int, uploads: int) -> float:
        """The spectral norm of the noise in a sum of Gram matrices (rows, rows) of `uploads` clients; 0: none is sent.

        By Wigner's semicircle law it is 2 sqrt(rows) times the standard deviation off the diagonal.
        """
        return math.sqrt(2 * rows * uploads) * self.of(SQUARE)

    def of(self, kind: str) -> float:
        """The deviation of the field of this kind; 0 if there is no such field."""
        return next((self.deviation[name] for name, own in self.summands.items() if own == kind), 0.0)

    def counted(self, total: Message) -> Message:
        """A sum of uploads whose counts are whole numbers again.

        A client that has a share of the noise doesn't round its own counts: that would round its share away.
        """
        counts = {name for name, kind in self.summands.items() if kind == COUNT and total[name].is_floating_point()}
        return total.with_tensors(
            {name: t.round().to(torch.int64) if name in counts else t for name, t in total.items()}
        )

    def loosened(self, expected: Schema, uploads: int = 1) -> Schema:
        """The expectation of a noisy upload: noise exceeds the ranges a little, and the forms no longer hold.

        Args:
            expected: the expectation without noise.
            uploads: how many clients' uploads, each with its own noise, are in the sum.
        """
        return {name: self._loosened(name, wanted, uploads) for name, wanted in expected.items()}

    def _loosened(self, name: str, wanted: Field, uploads: int) -> Field:
        deviation = self.deviation.get(name, 0.0) * math.sqrt(uploads)
        if deviation == 0:
            return wanted
        room = NOISE_BOUND * deviation + (0.5 * uploads if self.summands[name] == COUNT else 0.0)
        least = None if wanted.least is None else wanted.least - room
        form = "noisy gram" if wanted.form == "gram" else ""
        return replace(
            wanted,
            least=least,
            form=form,
            noise=deviation,
            per_sample=None,
            of="",
            by="",
            speaks_for="",
            zero_without="",
        )
