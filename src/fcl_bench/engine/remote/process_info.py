"""Every process's description of itself before the first round, and the parts that must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar, get_type_hints

import torch

import fcl_bench
from fcl_bench import environment
from fcl_bench.engine.blob import BadMessage, fits
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import Context

_Info = TypeVar("_Info", bound="ProcessInfo")


@dataclass(frozen=True)
class ProcessInfo:
    """One process.

    Attributes:
        process: its name, for messages ("rank 1").
        threads: with which the method computes on the CPU: sums round by them.
        preparing: threads of the process, where a network computes before the method does; None: where none does.
        device: "cpu", or the GPU's model.
    """

    process: str
    run: str
    package: str
    torch_version: str
    threads: int
    preparing: int | None
    device: str

    @classmethod
    def here(cls: type[_Info], process: str, run: str, context: Context, prepared: bool, **more: Any) -> _Info:
        """Of this process.

        Args:
            prepared: whether a network computes before the method does.
        """
        own = torch.get_num_threads()
        return cls(
            process=process,
            run=run,
            package=fcl_bench.__version__,
            torch_version=torch.__version__,
            threads=context.threads or own,
            preparing=own if prepared else None,
            device=environment.device_kind(context.device),
            **more,
        )

    @classmethod
    def read(cls: type[_Info], state: dict[str, Any]) -> _Info:
        """The attributes of another process as JSON.

        Raises:
            UserError: it has another version of fcl-bench, or says what none says of itself.
        """
        if (package := state.get("package")) != fcl_bench.__version__:
            process = state.get("process", "a process")
            raise UserError(
                f"{process} has fcl-bench {package}, the server {fcl_bench.__version__}",
                "the same version everywhere",
            )
        if not fits(state, cls):
            raise BadMessage("a process says what no process says of itself")
        parts: dict[str, Any] = {name: form for name, form in get_type_hints(cls).items() if is_dataclass(form)}
        return cls(**{**state, **{name: form(**state[name]) for name, form in parts.items()}})

    def record_entry(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {"fcl_bench": self.package, "torch": self.torch_version, "threads": self.threads}


#: What both ends must have in common: its name in `ProcessInfo`, the words for it, and what would work.
_SAME = {
    "torch_version": ("torch", "the same version everywhere"),
    "run": ("the run", "the same command, data and device everywhere"),
    "threads": (
        "threads:",
        "the same threads= and OMP_NUM_THREADS everywhere, since sums round by the number of threads",
    ),
    "preparing": (
        "threads for the network before the method:",
        "the same OMP_NUM_THREADS everywhere, since sums round by the number of threads",
    ),
    "device": ("the device", "the same kind of device everywhere"),
}


def require_alike(server: ProcessInfo, others: Iterable[ProcessInfo]) -> None:
    """Raise one `UserError` for all processes that differ from the server's in what changes results."""
    found: list[str] = []
    remedies: dict[str, None] = {}
    for other in others:
        for key, (words, remedy) in _SAME.items():
            there, here = getattr(other, key), getattr(server, key)
            if there != here:
                found.append(f"{other.process} has {words} {there}, the server {here}")
                remedies[remedy] = None
    if found:
        raise UserError("; ".join(found), "; ".join(remedies))
