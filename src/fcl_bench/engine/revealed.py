"""Which samples leave their clients alone: a sum over one sample is that sample (docs/privacy.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.engine.checkpoint import GROWING
from fcl_bench.engine.rows import Rows
from fcl_bench.protocol.message import Message

_TOLD = GROWING + "told"


@dataclass(frozen=True)
class Revealed:
    """What one upload reveals.

    Attributes:
        sums: how many of its sums are of one sample.
        moments: how many of its second moments are.
        samples: (m,) numbers among the client's labelled samples of those that are alone in any of them, ascending.
    """

    sums: int
    moments: int
    samples: np.ndarray


#: Nothing.
NOTHING = Revealed(0, 0, np.zeros(0, dtype=np.int64))


def revealed(upload: Message, samples: int) -> Revealed:
    """What an upload reveals by what its client half says of it.

    Args:
        upload: before anything of it is encoded.
        samples: n, the labelled samples of the client's shard.
    """
    sums, told = _alone(upload.sums_of, samples)
    moments, also = _alone(upload.moments_of, samples)
    if not sums and not moments:
        return NOTHING
    found = np.unique(np.concatenate([*told, *also]))
    return Revealed(sums, moments, found[found < samples])


def _alone(fields: Mapping[str, torch.Tensor | None], samples: int) -> tuple[int, list[np.ndarray]]:
    """How many sums have one sample, and per field which samples these are."""
    count, found = 0, []
    for which in fields.values():
        if which is None:
            if samples == 1:
                count += 1
                found.append(np.zeros(1, dtype=np.int64))
            continue
        # Shifted by one, so that what is in no sum is number 0.
        places = which.cpu().numpy() + 1
        alone = np.bincount(places) == 1
        alone[:1] = False
        own = np.flatnonzero(alone[places])
        count += len(own)
        found.append(own)
    return count, found


class ToldSamples:
    """The distinct training samples that were revealed so far, in the order in which they were."""

    def __init__(self) -> None:
        self._rows = Rows(np.dtype(np.int64))
        self._known = np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, samples: np.ndarray) -> None:
        """These samples (m,), numbers among all training samples without repetition, were revealed, again perhaps."""
        if not len(samples):
            return
        if (missing := 1 + int(samples.max()) - len(self._known)) > 0:
            self._known = np.pad(self._known, (0, max(missing, len(self._known))))
        new = samples[~self._known[samples]]
        self._known[new] = True
        self._rows.extend(new)

    def tensors(self) -> dict[str, torch.Tensor]:
        """A tensor that only grows."""
        return {_TOLD: self._rows.tensor()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `tensors` returned."""
        saved = Rows(np.dtype(np.int64))
        saved.restore(tensors[_TOLD])
        self._rows, self._known = Rows(np.dtype(np.int64)), np.zeros(0, dtype=bool)
        self.add(saved.array)
