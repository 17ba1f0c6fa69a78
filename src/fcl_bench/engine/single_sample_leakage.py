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
        sums: how many of its sums are of one sample.
        moments: how many of its second moments are.
        samples: (m,) indices, among the client's labelled samples, of those that are alone in any of these, ascending.
    """

    sums: int
    moments: int
    samples: np.ndarray


_NONE = np.zeros(0, dtype=np.int64)


def revealed(groups: Groups, samples: int) -> Leakage:
    """What an upload reveals.

    Args:
        groups: which sums its samples are in.
        samples: n, the labelled samples of the client's shard.
    """
    sums, single = _alone(groups[SUMS], samples)
    moments, also = _alone(groups[MOMENTS], samples)
    if not sums and not moments:
        return Leakage(0, 0, _NONE)
    found = np.unique(np.concatenate([*single, *also]))
    return Leakage(sums, moments, found[found < samples])


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


def revealed_together(uploads: Mapping[int, Grouped]) -> dict[int, Leakage]:
    """What the sum of several clients' uploads reveals, by the client whose sample it is.

    A sum that has several samples, over all clients together, hides each of them; a sum that has a single sample is
    that sample, whichever clients added zeros to it.

    Args:
        uploads: the groups of each client's upload.
    """
    sums, moments = (
        _alone_together({client: getattr(own, kind) for client, own in uploads.items()}) for kind in (SUMS, MOMENTS)
    )
    found = {}
    for client, own in uploads.items():
        single = np.unique(np.concatenate([sums[client], moments[client]]))
        found[client] = Leakage(len(sums[client]), len(moments[client]), own.samples[single[single < len(own.samples)]])
    return found


def _alone_together(fields: Mapping[int, Mapping[str, np.ndarray]]) -> dict[int, np.ndarray]:
    """Return, per client, the samples that are alone in a sum, once for each such sum."""
    found = {client: [_NONE] for client in fields}
    for name in dict.fromkeys(name for own in fields.values() for name in own):
        # Shifted by one, so that what is in no sum is number 0.
        places = {client: own[name] + 1 for client, own in fields.items() if name in own}
        alone = np.bincount(np.concatenate(list(places.values()))) == 1
        alone[:1] = False
        for client, own in places.items():
            found[client].append(np.flatnonzero(alone[own]))
    return {client: np.concatenate(own) for client, own in found.items()}
