"""Every process's description of itself before the first round, and the parts that must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

import fcl_bench
from fcl_bench import environment
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.raw_cost import RawSamples
from fcl_bench.errors import UserError
from fcl_bench.protocol.context import Context


@dataclass(frozen=True)
class ProcessInfo:
    """One process.

    Attributes:
        process: its name, for messages ("rank 1").
        run, stage: identity of what is under way, and which of its federations.
        package, torch_version: versions.
        threads: with which the method computes on the CPU: sums round by them.
        preparing: threads of the process, where a network computes before the method does; None: where none does.
        device: "cpu", or the GPU's model.
        clients: of this process, ascending.
        samples, labelled: [task][client of `clients`], counts.
        raw: what a sample would cost as it is; None: nobody says.
        data, platform: hash of its data and what it runs on, of a node with data of its own.
    """

    process: str
    run: str
    stage: str
    package: str
    torch_version: str
    threads: int
    device: str
    clients: list[int]
    samples: list[list[int]]
    labelled: list[list[int]]
    raw: RawSamples | None = None
    preparing: int | None = None
    data: str = ""
    platform: str = ""

    @classmethod
    def of(cls, process: str, clients: Clients, own: Iterable[int], raw: RawSamples | None = None) -> ProcessInfo:
        """Of this process, which has the clients `own`."""
        own = sorted(own)
        counts = [clients.samples(task) for task in range(clients.tasks)]
        return replace(
            cls.here(process, clients.run, clients.context, clients.prepared),
            stage=clients.stage,
            clients=own,
            samples=[samples[own].tolist() for samples, _ in counts],
            labelled=[labelled[own].tolist() for _, labelled in counts],
            raw=raw,
        )

    @classmethod
    def here(cls, process: str, run: str, context: Context, prepared: bool) -> ProcessInfo:
        """Of this process before it knows its clients.

        Args:
            process, run: as in the attributes.
            context: of the method.
            prepared: whether a network computes before the method does.
        """
        own = torch.get_num_threads()
        return cls(
            process=process,
            run=run,
            stage="",
            package=fcl_bench.__version__,
            torch_version=torch.__version__,
            threads=context.threads or own,
            device=environment.device_kind(context.device),
            clients=[],
            samples=[],
            labelled=[],
            preparing=own if prepared else None,
        )

    @classmethod
    def read(cls, state: dict[str, Any]) -> ProcessInfo:
        """What `state` of another process gave. Raises a `UserError` if that has another version of fcl-bench."""
        if (package := state.get("package")) != fcl_bench.__version__:
            process = state.get("process", "a process")
            raise UserError(
                f"{process} has fcl-bench {package}, the server {fcl_bench.__version__}",
                "the same version everywhere",
            )
        raw = state["raw"]
        return cls(**{**state, "raw": None if raw is None else RawSamples(**raw)})

    def state(self) -> dict[str, Any]:
        """It as JSON."""
        return asdict(self)


#: What both ends must have in common: its name in `ProcessInfo`, the words for it, and what would work.
_SAME = {
    "torch_version": ("torch", "the same version everywhere"),
    "run": ("the run", "the same command, data and device everywhere"),
    "stage": ("the stage", "the same command everywhere"),
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


def counted(infos: Iterable[ProcessInfo], clients: int, tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) and (T, K): samples and labelled samples of every client, from what the processes say.

    Raises:
        UserError: a client is in no process, or in two.
    """
    samples, labelled = np.zeros((2, tasks, clients), dtype=np.int64)
    process_of: dict[int, str] = {}
    for info in infos:
        for client in info.clients:
            if client in process_of:
                raise UserError(
                    f"client {client} is in {process_of[client]} and in {info.process}", "each client in one process"
                )
            if not 0 <= client < clients:
                raise UserError(f"{info.process} has client {client}", f"clients 0 to {clients - 1} (clients=...)")
            process_of[client] = info.process
        samples[:, info.clients], labelled[:, info.clients] = info.samples, info.labelled
    if missing := sorted(set(range(clients)) - set(process_of)):
        raise UserError(
            f"client {missing[0]} is in no process, as {len(missing)} of {clients} clients", "all are needed"
        )
    return samples, labelled
