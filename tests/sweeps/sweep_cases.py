"""A data set that takes its process down, for sweeps whose workers die."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from fcl_bench.data.sources.base import Dataset


@dataclass
class Deadly:
    """Kills the process that loads it, as the system does when memory runs out."""

    name: str = "deadly"

    def load(self) -> Dataset:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")
