"""Samples that leave their clients as single samples: a sum over one sample is that sample.

docs/explanation/privacy.md says what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.protocol.fields import MOMENTS, SUMS

#: For sums and for moments, by field which sum each sample is in (see `Uploads.groups`).
Groups = Mapping[str, Mapping[str, torch.Tensor | None]]


@dataclass(frozen=True)
class Leakage:
    """What one upload reveals.

    Attributes:
        samples: (m,) indices in the data set of those that are alone in any of these, ascending as the client has them.
    """

    sums: int
    moments: int
    samples: np.ndarray


@dataclass(frozen=True)
class Grouped:
    """Which sums of its upload each of a client's samples is in; this never leaves the engine.

    Attributes:
        sums, moments: per field, (n,) the number of the sum that each sample is in, -1 for none.
        samples: (n,) the indices of the shard's samples in the data set; entries beyond them belong to samples that the
            client keeps.
    """

    sums: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    samples: np.ndarray

    @classmethod
    def of(cls, groups: Groups, samples: np.ndarray) -> Grouped:
        """The groups of an upload that was made of these samples."""
        in_one = np.zeros(len(samples), dtype=np.int64)
        sums, moments = (
            {name: in_one if which is None else which.cpu().numpy() for name, which in groups[kind].items()}
            for kind in (SUMS, MOMENTS)
        )
        return cls(sums, moments, samples)


def revealed(uploads: Mapping[int, Grouped]) -> dict[int, Leakage]:
    """What an upload, or the sum of several clients' uploads, reveals, by the client whose sample it is.

    A sum that has several samples, over all clients together, hides each of them; a sum that has a single sample is
    that sample, whichever clients added zeros to it.
    """
    sums, moments = (
        _alone({client: getattr(own, kind) for client, own in uploads.items()}) for kind in (SUMS, MOMENTS)
    )
    found = {}
    for client, own in uploads.items():
        single = [*sums[client], *moments[client]]
        samples = np.unique(np.concatenate(single)) if single else np.zeros(0, dtype=np.int64)
        told = own.samples[samples[samples < len(own.samples)]]
        found[client] = Leakage(sum(map(len, sums[client])), sum(map(len, moments[client])), told)
    return found


def _alone(fields: Mapping[int, Mapping[str, np.ndarray]]) -> dict[int, list[np.ndarray]]:
    """Return, per client, the samples that are alone in a sum, in one array for each field that has such sums."""
    found: dict[int, list[np.ndarray]] = {client: [] for client in fields}
    for name in dict.fromkeys(name for own in fields.values() for name in own):
        # Shifted by one, so that what is in no sum is number 0.
        places = {client: own[name] + 1 for client, own in fields.items() if name in own}
        every = [*places.values()]
        alone = np.bincount(every[0] if len(every) == 1 else np.concatenate(every)) == 1
        alone[:1] = False
        for client, own in places.items() if alone.any() else ():
            found[client].append(np.flatnonzero(alone[own]))
    return found
