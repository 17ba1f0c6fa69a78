"""The choice "none" of each option. A run without options imports no other module of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fcl_bench.engine.codec import Middleware
    from fcl_bench.protocol.context import Context
    from fcl_bench.protocol.method import Method


@dataclass
class NoOption:
    """`faults=none`: every client answers. `noise=none`: uploads stay as methods make them. `secure=none`: the server
    sees every upload. `adapt=none`: the backbone as it comes."""

    name: ClassVar[str] = "none"
    fails: ClassVar[bool] = False
    noisy: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    trains_network: ClassVar[bool] = False

    def check(self, *problem: Any) -> None:
        """There is nothing to rule out."""

    def release(self, method: Method, context: Context) -> None:
        """Statistics go as they are."""

    def middleware(self, *run: Any, **site: Any) -> tuple[Middleware, ...]:
        return ()

    def guarantee(self, *run: Any) -> None:
        """Nothing is promised."""
