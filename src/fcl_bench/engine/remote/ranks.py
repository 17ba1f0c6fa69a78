"""`transport=ranks`: the processes that torchrun or Slurm started, over torch.distributed."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.data.sources.base import Split
from fcl_bench.engine.blob import LONGEST_HEADER
from fcl_bench.engine.checkpoint import ClientStore
from fcl_bench.engine.remote.host import Host, answered
from fcl_bench.engine.remote.peers import CLOSED, RankPeer
from fcl_bench.engine.remote.process_info import ProcessInfo, require_alike
from fcl_bench.engine.remote.transport import Gone, Remote, lost
from fcl_bench.engine.transport import Answers, Clients, Connection, OwnClients, Transport, TransportChoice
from fcl_bench.errors import UserError, first_line, machine_memory
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.message import Message


def assign(clients: Clients, processes: int) -> list[int]:
    """The process, from 0, of each client. A client never moves, since its state is there.

    In secure sums the server's process has none, and so no client's secrets.
    """
    samples, others = np.stack([clients.samples(task)[0] for task in range(clients.tasks)]), int(clients.context.sums)
    if processes == others:
        raise UserError("secure=sums over one rank: the server's process would have all secrets", "two ranks or more")
    return [others + process for process in balanced(samples, processes - others)]


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


#: Within which all ranks have to be there.
_MEETING = datetime.timedelta(minutes=5)
#: Longer than any turn or evaluation: that a process is alive is seen by its connection, not by a clock.
_PATIENCE = datetime.timedelta(days=30)
#: How long a process that leaves waits for the others to say that they do, too.
_FAREWELL = 5.0


def _has_gone(server: RankPeer) -> bool:
    """Whether rank 0 disconnects without a message in the next few seconds."""
    begin = time.monotonic()
    while (left := begin + _FAREWELL - time.monotonic()) > 0:
        try:
            server.receive(left)
        except Gone as error:
            return not server.ended and str(error) == CLOSED
    return False


def shares(start: int, end: int, batch: int, processes: int) -> list[range]:
    """Samples `start` to `end` in as many parts as there are processes; of each, whole batches of the whole pass.

    Args:
        start, end: of what is to be done; `start` begins a batch.
    """
    batches = -(-(end - start) // batch)
    ends = [min(start + batches * (number + 1) // processes * batch, end) for number in range(processes)]
    return [range(begin, stop) for begin, stop in zip([start, *ends], ends, strict=False)]


def first_batches(extractor: Extractor, split: Split, samples: range) -> Iterator[torch.Tensor]:
    """The features of these samples, one of the `shares`."""
    assert extractor.batch is not None
    return islice(extractor.batches(split, samples.start), -(-len(samples) // extractor.batch))


class ServerRank(Connection):
    """Rank 0: the server, and its share of the clients."""

    def __init__(self, rank: Rank) -> None:
        self._size = rank.size
        self._peers = {number: RankPeer(number, f"rank {number}") for number in range(1, rank.size)}
        self._infos: list[ProcessInfo] = []
        #: Of the last federation, the method's own.
        self._remote: Remote | None = None

    def begin(self, run: str, context: Context, prepared: bool) -> None:
        own = ProcessInfo.here("the server", run, context, prepared)
        for peer in self._peers.values():
            peer.request("plan")
        self._infos = [ProcessInfo.read(peer.response("plan").beside) for peer in self._peers.values()]
        require_alike(own, self._infos)

    def federate(self, clients: Clients, inputs: torch.Tensor, states: Path) -> Transport:
        assignment = assign(clients, self._size)
        for rank, peer in self._peers.items():
            message = None
            if inputs.is_floating_point():
                rows = clients.rows(clients_in(assignment, rank))
                message = Message({"inputs": inputs[torch.from_numpy(rows)]})
            peer.request("open", message, stage=clients.stage, states=str(states.absolute()))
            del message
        own = clients_in(assignment, 0)
        samples = inputs[torch.from_numpy(clients.rows(own))]
        local = Host(clients, own, samples, ClientStore(states, clients.run, "rank-0"))
        for peer in self._peers.values():
            peer.response("opened")
        self._remote = Remote(clients, self._peers, assignment, local)
        return self._remote

    def batches(self, extractor: Extractor, side: str, split: Split, start: int) -> Iterator[torch.Tensor]:
        batch = extractor.batch
        if batch is None or len(split) - start < self._size * batch:
            yield from extractor.batches(split, start)
            return
        own, *others = shares(start, len(split), batch, self._size)
        for peer, share in zip(self._peers.values(), others, strict=True):
            peer.most = max(peer.most, LONGEST_HEADER + 8 * len(share) * extractor.dimension(split))
            peer.request("extract", side=side, start=share.start, end=share.stop)
        yield from first_batches(extractor, split, own)
        for peer in self._peers.values():
            yield peer.response("features").message["features"]

    def hand_on(self, network: Mapping[str, torch.Tensor]) -> None:
        for peer in self._peers.values():
            peer.request("network", Message(dict(network)))
        for peer in self._peers.values():
            peer.response("taken")

    def complete(self) -> None:
        # Ranks on other machines have folders of their own.
        if self._remote is not None:
            self._remote.delete_states()

    def about(self) -> dict[str, Any]:
        return {
            "processes": self._size,
            "backend": dist.get_backend(),
            "ranks": [{"name": info.process, **info.record_entry()} for info in self._infos],
        }

    def close(self) -> None:
        """Send the others home."""
        for peer in self._peers.values():
            peer.end()
        for peer in self._peers.values():
            peer.await_end(_FAREWELL)


@dataclass
class OverRanks(TransportChoice):
    """The clients assigned to the ranks that torchrun or Slurm started; rank 0 has the server, too."""

    name: ClassVar[str] = "ranks"
    launched: ClassVar[bool] = True

    @property
    def follows(self) -> bool:
        return this_rank().number > 0

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        rank = this_rank()
        with self._group(rank), closing(ServerRank(rank)) as connection:
            yield connection

    def follow(self, site: Callable[[str, OwnClients], Answers]) -> None:
        """Answer rank 0 until it says that the run is over. Raises a `UserError` if it leaves without a message."""
        rank = this_rank()
        answers = site(f"rank {rank.number}", lambda clients: clients_in(assign(clients, rank.size), rank.number))
        with self._group(rank):
            server = RankPeer(0, "rank 0", machine_memory())  # it decides what this process has to hold
            try:
                while not server.ended:
                    for blob in answered(server.receive(), answers):
                        if server.ended:
                            break
                        server.send(blob)
            except Gone as error:
                if not server.ended:
                    raise lost("rank 0", error) from error
            except KeyboardInterrupt:
                # Rank 0 reports a signal that all ranks got, unless the end of rank 0 is the reason for the signal.
                if rank.number == 1 and _has_gone(server):
                    raise lost("rank 0", Gone(CLOSED)) from None
                raise
            server.end()

    @property
    def speaks(self) -> bool:
        # Of what happens to rank 0 somebody has to tell.
        return this_rank().number <= 1

    @contextmanager
    def _group(self, rank: Rank) -> Iterator[None]:
        """The process group, and a GPU of this process's own where there are GPUs."""
        if torch.cuda.is_available():
            torch.cuda.set_device(rank.local % torch.cuda.device_count())
        os.environ |= {"MASTER_ADDR": rank.address, "MASTER_PORT": str(rank.port)}
        try:
            store, _, _ = next(dist.rendezvous("env://", rank.number, rank.size, timeout=_MEETING))
            store.set_timeout(_MEETING)
            dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.size, timeout=_PATIENCE)
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise UserError(
                f"the {rank.size} ranks did not meet at {rank.address}:{rank.port}: {first_line(error)}",
                "the same command on all of them",
            ) from error
        try:
            yield
        finally:
            dist.destroy_process_group()


_REMEDY = "torchrun --nproc-per-node N -m fcl_bench ..., or srun fcl-bench ... in a Slurm job"


@dataclass(frozen=True)
class Rank:
    """A process among those of a run.

    Attributes:
        number: from 0, which has the server.
    """

    number: int
    size: int
    local: int
    address: str
    port: int


def this_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Which process this one is. Raises a `UserError`: no launcher has said, or what it says makes no sense."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if names[0] in environment and names[1] in environment:
            number, size, local = (_number(environment, name) for name in names)
            if not 0 <= number < size:
                raise UserError(f"{names[0]}={number} is no rank of {names[1]}={size}", _REMEDY)
            return Rank(number, size, local, _address(environment), _port(environment))
    raise UserError("transport=ranks, and nothing says which rank this process is", _REMEDY)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isascii() or not text.isdigit():
        raise UserError(f"{name}={text} is no number", _REMEDY)
    return int(text)


def _address(environment: Mapping[str, str]) -> str:
    if address := environment.get("MASTER_ADDR"):
        return address
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes and "[" not in nodes:
        return nodes.split(",")[0]
    if nodes and shutil.which("scontrol"):
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and listed.stdout.split():
            return listed.stdout.split()[0]
    raise UserError(
        "transport=ranks, and nothing says where the ranks meet",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    )


def _port(environment: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    # Two jobs on one machine are not to meet.
    return 20_000 + _number(environment, "SLURM_JOB_ID") % 20_000
