"""Random generators, each derived from the one seed and a purpose.

Every consumer names its purpose (and task, client, ...), so a new consumer never changes another's draws and
clients can run in any order.
"""

import hashlib

import numpy as np


def _entropy(seed: int, purpose: str, indices: tuple[int, ...]) -> np.random.SeedSequence:
    tag = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    # The count distinguishes () from (0,): short entropy is padded with zeros.
    return np.random.SeedSequence([seed, tag, len(indices), *indices])


def generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """A NumPy generator for `purpose` at `indices` (task, client, ...), all non-negative."""
    return np.random.default_rng(_entropy(seed, purpose, indices))


def derived_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `purpose`, for a library's own generator or for the wire (8 bytes)."""
    state = _entropy(seed, purpose, indices).generate_state(2, np.uint32)
    return (int(state[0]) << 31) ^ int(state[1])
