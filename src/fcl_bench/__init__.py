"""fcl-bench: federated continual learning methods under one split, one ledger and one set of tables.

In Python, `run` does a run, `sweep` many, `runs` lists those that are done, `load` opens one,
and `rank` puts it among the rows of a leaderboard: docs/reference/python.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcl_bench.api import Model, Run, load, run, runs, sweep
    from fcl_bench.errors import UserError
    from fcl_bench.leaderboard.rank import rank

__all__ = ["Model", "Run", "UserError", "load", "rank", "run", "runs", "sweep"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported only now, and by name: a command that prints a version need not wait for torch, and no package below
    # `api` needs it.
    if name in __all__:
        return getattr(import_module("fcl_bench.leaderboard.rank" if name == "rank" else "fcl_bench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
