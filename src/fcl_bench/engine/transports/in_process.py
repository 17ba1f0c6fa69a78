"""All clients in the server's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fcl_bench.engine.client_state import ClientStore
from fcl_bench.engine.clients import Clients
from fcl_bench.engine.transport import InProcess, Transport
from fcl_bench.engine.transports.base import Connection, TransportChoice


class Here(Connection):
    """The one process."""

    def federate(self, clients: Clients, inputs: torch.Tensor, states: Path) -> Transport:
        # What other processes of the same run saved before is found there.
        return InProcess.over(clients, inputs, ClientStore(states, clients.run))

    def about(self) -> dict[str, Any]:
        return {"processes": 1}


@dataclass
class InOneProcess(TransportChoice):
    """All clients in the server's process."""

    name: ClassVar[str] = "in_process"
    sees_everything: ClassVar[bool] = True

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        yield Here()
