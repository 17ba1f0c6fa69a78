"""Random generators, each derived from the one seed and a purpose.

Every consumer names its purpose (and task, client, ...), so a new consumer never changes another's draws and
clients can run in any order.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from fcl_bench.errors import UserError


def _entropy(seed: int, purpose: str, indices: tuple[int, ...]) -> np.random.SeedSequence:
    # The count distinguishes () from (0,): short entropy is padded with zeros.
    return np.random.SeedSequence([seed, _tag(purpose), len(indices), *indices])


@lru_cache(maxsize=1024)
def _tag(purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")


def generator(seed: int, purpose: str, *indices: int) -> np.random.Generator:
    """A NumPy generator for `purpose` at `indices` (task, client, ...), all non-negative."""
    return np.random.default_rng(_entropy(seed, purpose, indices))


def derived_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `purpose`, for a library's own generator or for the wire (8 bytes)."""
    state = _entropy(seed, purpose, indices).generate_state(2, np.uint32)
    return (int(state[0]) << 31) ^ int(state[1])


def legacy_generator(seed: int) -> np.random.RandomState:
    """What draws after `np.random.seed(seed)`, as in much public code; a `UserError` if that takes no such seed."""
    if seed >= 2**32:
        raise UserError(
            f"seed={seed}: NumPy's old generator, which public code draws from, takes none of this size",
            f"0 to {2**32 - 1}",
        )
    return np.random.RandomState(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context that seeds torch's CPU generator with `seed` and restores its state afterwards.

    `torch.manual_seed` would seed the GPUs' generators as well, and leave them so.
    """
    import torch

    # `torch.random.fork_rng` does the same, and takes three times as long.
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
