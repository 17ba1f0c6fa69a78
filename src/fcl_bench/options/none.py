"""The choice "none" of each option. A run without options imports no other module of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from fcl_bench.engine.codec import Middleware
    from fcl_bench.engine.ledger import Ledger
    from fcl_bench.engine.reports import Guarantee
    from fcl_bench.options.noise.mechanism import DPMechanism
    from fcl_bench.protocol.context import Context
    from fcl_bench.protocol.method import Method


@dataclass
class NoFaults:
    """Every client answers every time."""

    name: ClassVar[str] = "none"
    fails: ClassVar[bool] = False

    def check(self, clients: int, tasks: int) -> None:
        """There is nothing to rule out."""


@dataclass
class NoNoise:
    """Uploads stay as methods make them."""

    name: ClassVar[str] = "none"
    noisy: ClassVar[bool] = False

    def check(self, method: Method, context: Context) -> None:
        """There is nothing to rule out."""

    def release(self, method: Method, context: Context) -> DPMechanism | None:
        """Statistics go as they are."""
        return None

    def middleware(self, method: Method, context: Context, tasks: int, apart: bool = False) -> Sequence[Middleware]:
        """Nothing stands before the wire."""
        return ()

    def guarantee(self, method: Method, context: Context, tasks: int, ledger: Ledger) -> Guarantee | None:
        """Nothing is promised."""
        return None


@dataclass
class NoSecurity:
    """The server sees every upload."""

    name: ClassVar[str] = "none"
    sums: ClassVar[bool] = False

    def check(self, method: Method, context: Context, clients: int, drops: bool) -> None:
        """There is nothing to rule out."""


@dataclass
class NoAdaptation:
    """The backbone as it comes."""

    name: ClassVar[str] = "none"
    trains_network: ClassVar[bool] = False

    def check(self, context: Context, classes_per_task: list[int]) -> None:
        """There is nothing to rule out."""
