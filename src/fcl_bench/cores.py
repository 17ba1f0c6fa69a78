"""How many cores there are for this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use (a cluster's job has fewer than its machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
