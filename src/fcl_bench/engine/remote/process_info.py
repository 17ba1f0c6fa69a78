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
        clients: who lives there, ascending.
        samples, labelled: [task][client of `clients`], counts.
        raw: what a sample would cost as it is; None: nobody says.
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
    raw: dict[str, Any] | None = None
    preparing: int | None = None

    @classmethod
    def of(cls, process: str, clients: Clients, own: Iterable[int], raw: RawSamples | None = None) -> ProcessInfo:
        """Return the census of this process, in which the clients `own` live."""
        own = sorted(own)
        counts = [clients.samples(task) for task in range(clients.tasks)]
        return replace(
            cls.here(process, clients.run, clients.context, clients.prepared),
            stage=clients.stage,
            clients=own,
            samples=[samples[own].tolist() for samples, _ in counts],
            labelled=[labelled[own].tolist() for _, labelled in counts],
            raw=None if raw is None else raw.state(),
        )

    @classmethod
    def here(cls, process: str, run: str, context: Context, prepared: bool) -> ProcessInfo:
        """Return the census of this process before it knows its clients.

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

    def state(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


#: What both ends must have in common: its name in `ProcessInfo`, the words for it, and what would work.
_SAME = {
    "package": ("fcl-bench", "the same version everywhere"),
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


def counted(censuses: Iterable[ProcessInfo], clients: int, tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) and (T, K): samples and labelled samples of every client, from what the processes say.

    Raises:
        UserError: a client lives nowhere, or in two places.
    """
    samples, labelled = np.zeros((2, tasks, clients), dtype=np.int64)
    homes: dict[int, str] = {}
    for census in censuses:
        for client in census.clients:
            if client in homes:
                raise UserError(
                    f"client {client} lives in {homes[client]} and in {census.process}", "each client in one process"
                )
            if not 0 <= client < clients:
                raise UserError(f"{census.process} has client {client}", f"clients 0 to {clients - 1} (clients=...)")
            homes[client] = census.process
        samples[:, census.clients], labelled[:, census.clients] = census.samples, census.labelled
    if missing := sorted(set(range(clients)) - set(homes)):
        raise UserError(f"client {missing[0]} lives nowhere, {len(missing)} of {clients} clients do", "all are needed")
    return samples, labelled
