"""What both halves know of noise in uploads of statistics: how large a sample is in them, and how noisy they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fcl_bench.protocol.expected import Expectation, Expected

#: What one sample, h of class y, adds to a field: h h', h in the column of y, 1 at y. Of nothing else the share of one
#: sample is bounded (`Method.summands`, docs/noise.md).
SQUARE, COLUMN, COUNT = "square", "column", "count"
#: How many standard deviations noise never reaches: once in 10^15 draws.
_NEVER = 8.0


@dataclass(frozen=True)
class Release:
    """Statistics of clipped samples, and the Gaussian noise that each client adds to its own.

    Attributes:
        clip: no |h| is above it.
        summands: what each field adds up.
        deviation: standard deviation of the noise in each number of a field; of a "square" on its diagonal, and
            1/sqrt(2) of that beside it.
        ridge: how many times the noise of a Gram matrix is added to its eigenvalues before a system is solved with it.
    """

    clip: float
    summands: Mapping[str, str]
    deviation: Mapping[str, float]
    ridge: float = 1.0

    def edge(self, rows: int, uploads: int) -> float:
        """The spectral norm of the noise in a sum of Gram matrices (rows, rows) of `uploads` clients; 0: none is sent.

        By Wigner's semicircle law 2 sqrt(rows) times the standard deviation beside the diagonal.
        """
        return math.sqrt(2 * rows * uploads) * self.of(SQUARE)

    def of(self, kind: str) -> float:
        """The deviation of the field of a kind; 0: there is none."""
        return next((self.deviation[name] for name, own in self.summands.items() if own == kind), 0.0)

    def loosened(self, expected: Expectation, uploads: int = 1) -> Expectation:
        """What can still be asked of an upload: noise leaves the ranges by little, and the forms altogether.

        Args:
            expected: without noise.
            uploads: how many clients' uploads, each with noise of its own, it is the sum of.
        """
        return {name: self._loosened(name, wanted, uploads) for name, wanted in expected.items()}

    def _loosened(self, name: str, wanted: Expected, uploads: int) -> Expected:
        deviation = self.deviation.get(name, 0.0) * math.sqrt(uploads)
        if deviation == 0:
            return wanted
        room = _NEVER * deviation + (0.5 * uploads if self.summands[name] == COUNT else 0.0)
        least = None if wanted.least is None else wanted.least - room
        form = "noisy gram" if wanted.form == "gram" else ""
        return replace(wanted, least=least, form=form, noise=deviation, per_sample=None, of="", by="", speaks_for="")


def noise_room(deviation: float, rows: int) -> float:
    """More than the spectral norm of the noise in one Gram matrix (rows, rows), all but surely."""
    return deviation * (math.sqrt(2 * rows) + _NEVER)
