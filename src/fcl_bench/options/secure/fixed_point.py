"""Real numbers as whole multiples of a step, so that sums of them are exact and masks may wrap around."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fcl_bench.engine.codec import PACKED
from fcl_bench.errors import UserError
from fcl_bench.linalg.structure import packed
from fcl_bench.linalg.tensors import all_finite
from fcl_bench.protocol.message import Message

#: After the names of numbers that travel as multiples of the step, and of whole ones.
FIXED, WHOLE = "::fixed", "::whole"
#: Under which `Message.samples` travels: it is added up as all else is.
SAMPLES = "::samples"


@dataclass(frozen=True)
class FixedPoint:
    """Numbers x travel as round(x 2^fraction_bits) modulo 2^bits.

    Each is off by half a step at most, so a sum of n of them by n / 2 steps; sums are exact beyond that.
    """

    bits: int
    fraction_bits: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of what travels; it is signed, since torch has no arithmetic for unsigned numbers."""
        return torch.int64 if self.bits == 64 else torch.int32

    def most(self, clients: int) -> int:
        """Return the largest multiple of the step in absolute terms that each of so many clients may send."""
        return (2 ** (self.bits - 1) - 1) // clients

    def encoded(
        self, upload: Message, clients: int, client: int, triangles: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return all of an upload that is added up, `Message.samples` too, by name in ascending order, on the CPU.

        Args:
            clients: n, of how many uploads the sum may be.
            triangles: names of the symmetric matrices of which only the upper triangle travels.

        Raises:
            UserError: a number is so large that the sum could wrap around.
            FloatingPointError: a number is not finite.
        """
        found: dict[str, torch.Tensor] = {}
        for name, tensor in upload.items():
            if not tensor.is_floating_point():
                found[name + WHOLE] = self._within(tensor.long(), name, upload, clients, client, 1.0)
                continue
            if not all_finite(tensor):
                raise FloatingPointError(f"the upload's {name} is not finite")
            triangle = name in triangles
            value = packed(tensor) if triangle else tensor
            # A power of two, so that nothing is rounded but to the step.
            multiples = (value.double() * 2.0**self.fraction_bits).round_()
            step = 2.0**-self.fraction_bits
            found[name + (PACKED if triangle else "") + FIXED] = self._within(
                multiples, name, upload, clients, client, step
            )
        if upload.samples is not None:
            found[SAMPLES + WHOLE] = torch.tensor([upload.samples], dtype=self.dtype)
        return dict(sorted(found.items()))

    def _within(
        self, multiples: torch.Tensor, name: str, upload: Message, clients: int, client: int, step: float
    ) -> torch.Tensor:
        """Return `multiples` in the type in which they travel; none is larger than `most`."""
        largest = max(abs(int(end)) for end in torch.aminmax(multiples)) if multiples.numel() else 0
        if largest > self.most(clients):
            raise UserError(
                f"client {client}'s {name} in task {upload.task}, round {upload.round} ({upload.stage}) holds"
                f" {largest * step:.4g}, and secure.bits={self.bits} secure.fraction_bits={self.fraction_bits} hold"
                f" numbers up to {self.most(clients) * step:.4g} of each of {clients} clients",
                "a smaller secure.fraction_bits, secure.bits=64, or features of a smaller scale",
            )
        # A copy, whatever type it had: masks are put on in place.
        return multiples.to("cpu", self.dtype, copy=True).contiguous()

    def decoded(self, sums: Mapping[str, torch.Tensor], like: Message, uploads: int) -> Message:
        """Return the sum of the uploads, real numbers in float64.

        Args:
            sums: what `encoded` returned, added up.
        """
        tensors = {}
        for name, total in sums.items():
            if name.endswith(WHOLE):
                tensors[name.removesuffix(WHOLE)] = total.long()
            else:
                tensors[name.removesuffix(FIXED)] = total.double() * 2.0**-self.fraction_bits
        samples = tensors.pop(SAMPLES, None)
        made = Message(tensors, like.stage, None if samples is None else int(samples), task=like.task, round=like.round)
        return dataclasses.replace(made, clients=uploads)


def flat(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a contiguous integer tensor on the CPU as unsigned ones (n,), in the same memory."""
    numbers = tensor.flatten().numpy()
    return numbers.view(np.dtype(f"u{numbers.itemsize}"))
