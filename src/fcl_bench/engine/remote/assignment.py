"""Which clients are in which process."""

from __future__ import annotations

import numpy as np

from fcl_bench.engine.transport import Clients


def assign(clients: Clients, processes: int) -> list[int]:
    """The process, from 0, of each client. A client never moves, since its state is there."""
    return balanced(np.stack([clients.samples(task)[0] for task in range(clients.tasks)]), processes)


def balanced(samples: np.ndarray, processes: int) -> list[int]:
    """Assign clients to processes so that these have about as many samples as each other in every task.

    Uploads are absorbed in client order, so each process gets one of as many neighbours as there are processes: then
    neighbours work at the same time. Among these neighbours, the client with the most samples chooses first. Each goes
    where it adds the least to the sum, over tasks, of the busiest process's samples, for which the others wait.

    Args:
        samples: (T, K).
    """
    tasks, clients = samples.shape
    found = [0] * clients
    load = np.zeros((processes, tasks), dtype=np.int64)
    for first in range(0, clients, processes):
        group = range(first, min(first + processes, clients))
        free = list(range(processes))
        for client in sorted(group, key=lambda client: -int(samples[:, client].sum())):
            own = samples[:, client]
            after = np.maximum(load.max(axis=0), load[free] + own).sum(axis=1)
            # Of equal ones, the process with the fewest samples so far, then in turn.
            turn = client % processes
            chosen = min(
                zip(after, load[free].sum(axis=1), free, strict=True),
                key=lambda one: (*one[:2], one[2] != turn, one[2]),
            )
            found[client] = chosen[2]
            free.remove(found[client])
            load[found[client]] += own
    return found


def clients_in(assignment: list[int], process: int) -> list[int]:
    """The clients of a process, ascending."""
    return [client for client, other in enumerate(assignment) if other == process]
