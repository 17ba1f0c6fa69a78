"""Seconds of a block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Wall-clock seconds of a block; on CUDA the block ends with a synchronisation."""

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self.seconds = seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the block's seconds."""
        self._synchronise()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._synchronise()
            self.seconds += time.perf_counter() - begin

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
