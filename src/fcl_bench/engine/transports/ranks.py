"""`transport=ranks`: the processes that torchrun or Slurm started, over torch.distributed."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fcl_bench.backbones.backbone import Extractor
from fcl_bench.config import knob
from fcl_bench.data.sources.base import Split
from fcl_bench.engine.client_state import Keeper
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.remote.assignment import homes, residents
from fcl_bench.engine.remote.host import Host, answered
from fcl_bench.engine.remote.peers import CLOSED, Peer
from fcl_bench.engine.remote.placing import Place, place
from fcl_bench.engine.remote.process_info import ProcessInfo, require_alike
from fcl_bench.engine.remote.replies import Received, deserialise, serialise
from fcl_bench.engine.remote.transport import Gone, Remote, lost
from fcl_bench.engine.remote.waiting import share_of
from fcl_bench.engine.transport import Transport
from fcl_bench.engine.transports.base import Connection, Reach
from fcl_bench.errors import UserError, first_line
from fcl_bench.protocol.message import Message

#: Longer than any turn or evaluation: that a process is alive is seen by its connection, not by a clock.
_PATIENCE = datetime.timedelta(days=30)
#: How long a process that leaves waits for the others to say that they do, too.
_FAREWELL = 5.0


def _has_gone(server: Peer) -> bool:
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
        batch: samples of a batch.
        processes: at most as many as there are batches.
    """
    batches = -(-(end - start) // batch)
    ends = [min(start + batches * (number + 1) // processes * batch, end) for number in range(processes)]
    return [range(begin, stop) for begin, stop in zip([start, *ends], ends, strict=False)]


def rank_name(rank: int) -> str:
    return f"rank {rank}"


class ServersRank(Connection):
    """Rank 0: the server, and its share of the clients."""

    def __init__(self, where: Place) -> None:
        self._size = where.size
        share = share_of(where.size)
        self._peers = {rank: Peer(rank, rank_name(rank), share) for rank in range(1, where.size)}
        self.names = [rank_name(rank) for rank in range(where.size)]
        self._censuses: list[ProcessInfo] = []
        #: Of the last federation, the method's own.
        self._remote: Remote | None = None

    def send(self, process: int, request: bytes) -> None:
        """See `Channel`."""
        self._peers[process].send(request)

    def receive(self, process: int) -> memoryview:
        """See `Channel`."""
        return self._peers[process].receive()

    def ready(self, process: int) -> bool:
        """See `Channel`."""
        return self._peers[process].ready()

    def begin(self, own: ProcessInfo) -> None:
        for rank in self._peers:
            self._ask(rank, serialise("plan"))
        self._censuses = [ProcessInfo(**self._hear(rank, "plan").beside) for rank in self._peers]
        require_alike(own, self._censuses)

    def federate(self, clients: Clients, inputs: torch.Tensor, keep: Path) -> Transport:
        places = homes(clients, self._size)
        for rank in self._peers:
            message = None
            if inputs.is_floating_point():
                rows = clients.rows(residents(places, rank))
                message = Message({"inputs": inputs[torch.from_numpy(rows)]})
            self._ask(rank, serialise("open", message, stage=clients.stage, keep=str(keep.absolute())))
            del message
        own = residents(places, 0)
        samples = inputs[torch.from_numpy(clients.rows(own))]
        local = Host(rank_name(0), clients, own, samples, Keeper(keep, clients.run, "rank-0"))
        for rank in self._peers:
            self._hear(rank, "opened")
        self._remote = Remote(clients, self, [place or -1 for place in places], local, share_of(self._size))
        return self._remote

    def batches(self, extractor: Extractor, side: str, split: Split, start: int) -> Iterator[torch.Tensor]:
        batch = extractor.batch
        if batch is None or len(split) - start < self._size * batch:
            yield from extractor.batches(split, start)
            return
        own, *others = shares(start, len(split), batch, self._size)
        for rank, share in zip(self._peers, others, strict=True):
            self._ask(rank, serialise("extract", side=side, start=share.start, end=share.stop))
        done = start
        for features in extractor.batches(split, start):
            yield features
            done += len(features)
            if done >= own.stop:
                break
        for rank in self._peers:
            yield self._hear(rank, "features").message["features"]

    def hand_on(self, network: Mapping[str, torch.Tensor]) -> None:
        for rank in self._peers:
            self._ask(rank, serialise("network", Message(dict(network))))
        for rank in self._peers:
            self._hear(rank, "taken")

    def complete(self) -> None:
        """See `Connection`. Ranks on other machines have folders of their own."""
        if self._remote is not None:
            self._remote.forget()

    def about(self) -> dict[str, Any]:
        return {
            "processes": self._size,
            "backend": dist.get_backend(),
            "ranks": [
                {
                    "name": other.process,
                    "fcl_bench": other.package,
                    "torch": other.torch_version,
                    "threads": other.threads,
                }
                for other in self._censuses
            ],
        }

    def _ask(self, rank: int, request: bytes) -> None:
        try:
            self.send(rank, request)
        except Gone as error:
            raise lost(rank_name(rank), error) from error

    def _hear(self, rank: int, kind: str) -> Received:
        try:
            answer = deserialise(self.receive(rank))
        except Gone as error:
            raise lost(rank_name(rank), error) from error
        if answer.kind != kind:
            raise ValueError(f"{rank_name(rank)} answered {answer.kind}, not {kind}")
        return answer

    def close(self) -> None:
        """Send the others home."""
        for peer in self._peers.values():
            peer.end()
        for peer in self._peers.values():
            peer.await_end(_FAREWELL)


@dataclass
class OverRanks(Reach):
    """The clients dealt to the ranks that torchrun or Slurm started; rank 0 has the server, too.

    Args:
        meeting: seconds within which all ranks have to be there.
    """

    name: ClassVar[str] = "ranks"
    launched: ClassVar[bool] = True

    meeting: float = knob(300.0, above=0, identity=False)

    @property
    def follows(self) -> bool:
        return place().rank > 0

    @property
    def process(self) -> str:
        return rank_name(place().rank)

    def residents(self, clients: Clients) -> list[int]:
        where = place()
        return residents(homes(clients, where.size), where.rank)

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        where = place()
        with self._group(where):
            link = ServersRank(where)
            try:
                yield link
            finally:
                link.close()

    def follow(self, answers: Callable[[Received], Iterator[bytes]]) -> None:
        """Answer rank 0 until it says that the run is over. Raises a `UserError` if it leaves without a message."""
        where = place()
        with self._group(where):
            server = Peer(0, rank_name(0))
            try:
                self._serve(server, answers)
            except Gone as error:
                if not server.ended:
                    raise lost(rank_name(0), error) from error
            except KeyboardInterrupt:
                # Rank 0 reports a signal that all ranks got, unless the end of rank 0 is the reason for the signal.
                if where.rank == 1 and _has_gone(server):
                    raise lost(rank_name(0), Gone(CLOSED)) from None
                raise
            server.end()

    @staticmethod
    def _serve(server: Peer, answers: Callable[[Received], Iterator[bytes]]) -> None:
        while True:
            for blob in answered(server.receive(), answers):
                if server.ended:
                    return
                server.send(blob)

    @property
    def speaks(self) -> bool:
        # Of what happens to rank 0 somebody has to tell.
        return place().rank <= 1

    @contextmanager
    def _group(self, where: Place) -> Iterator[None]:
        """The process group, and a GPU of this process's own where there are GPUs."""
        if torch.cuda.is_available():
            torch.cuda.set_device(where.local % torch.cuda.device_count())
        os.environ |= {"MASTER_ADDR": where.address, "MASTER_PORT": str(where.port)}
        meeting = datetime.timedelta(seconds=self.meeting)
        try:
            store, _, _ = next(dist.rendezvous("env://", where.rank, where.size, timeout=meeting))
            store.set_timeout(meeting)
            dist.init_process_group("gloo", store=store, rank=where.rank, world_size=where.size, timeout=_PATIENCE)
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise UserError(
                f"the {where.size} ranks did not meet at {where.address}:{where.port}: {first_line(error)}",
                "the same command on all of them, or a larger transport.meeting",
            ) from error
        try:
            yield
        finally:
            dist.destroy_process_group()
