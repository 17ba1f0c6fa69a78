"""`secure=sums`: the knobs of the masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from fcl_bench.config import knob
from fcl_bench.errors import UserError, installing
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method


@dataclass
class SecureSums:
    """The server sees only sums over clients.

    Numbers travel as whole multiples of the step 2^-fraction_bits, modulo 2^bits, under masks that cancel in the sum.
    """

    name: ClassVar[str] = "sums"
    sums: ClassVar[bool] = True

    bits: int = knob(64, least=32, most=64, words="32 or 64")
    fraction_bits: int = knob(24, least=0, most=62)
    threshold: float = knob(0.6, above=0, most=1)
    neighbours: int | None = knob(None, least=2)

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise UserError(f"secure.bits={self.bits} is no width of a number", "secure.bits=32 or 64")
        if self.fraction_bits > self.bits - 2:
            raise UserError(
                f"secure.fraction_bits={self.fraction_bits} leaves no room for numbers of secure.bits={self.bits}",
                f"at most {self.bits - 2}",
            )
        if self.neighbours is not None and self.neighbours % 2:
            raise UserError(
                f"secure.neighbours={self.neighbours} is odd, and there are as many on either side", "an even number"
            )

    @property
    def step(self) -> float:
        """Return the step between two numbers that can travel."""
        return 2.0**-self.fraction_bits

    def least(self, holders: int) -> int:
        """Return t, the least number of `holders` who have to answer; it is never 1 if there are several."""
        # The rounding error of a product such as 0.7 times 10 is subtracted.
        return max(min(2, holders), math.ceil(self.threshold * holders - 1e-9))

    def check(self, method: Method, context: Context, clients: int, drops: bool) -> None:
        """Raise a `UserError` for what sums rule out, before any work is done.

        Args:
            context: in which form they would travel, and that only sums are seen.
            clients: K.
            drops: whether bad uploads are left out.
        """
        if clients == 1:
            raise UserError("secure=sums with clients=1: the sum over one client is its upload", "clients=2 or more")
        if found := Uploads.of(method, context).needed_each():
            stage, name, otherwise = found
            what = "upload" if name == "*" else name
            raise UserError(
                f"secure=sums: the server of method={method.name} needs each client's {what} by itself ({stage})",
                f"secure=none, or {otherwise or 'a method whose uploads add up, such as method=stsa'}",
            )
        if drops:
            raise UserError(
                "on_bad_upload=drop with secure=sums: the server sees no single upload that it could leave out",
                "on_bad_upload=fail",
            )
        if context.wire.columns == "held":
            raise UserError(
                "wire.columns=held with secure=sums: which columns travel would tell which classes a client holds",
                "wire.columns=task",
            )
        if find_spec("cryptography") is None:
            raise UserError("secure=sums needs the package cryptography, which is not installed", installing("secure"))
