"""What a server expects of an upload. The engine checks every upload against it; nothing else is absorbed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

#: The length of a side of a tensor: a number, or a name for a length that the sender chooses. The same name means the
#: same length wherever it stands in one upload.
Side = int | str

#: No weight of a network is larger. A training that diverges reaches such numbers too; its client, which knows the step
#: size, reports it once they are no longer finite.
LARGEST_WEIGHT = 1e30


@dataclass(frozen=True)
class Field:
    """One tensor of an upload.

    Attributes:
        shape: its sides.
        kind: "real" (floating point, finite, and so small that products of two stay finite), "whole" (integers), or
            "bytes" (uint8).
        least: no value is below it; None: no bound.
        below: every value is below it; None: no bound.
        most: no value is above it; None: no bound.
        optional: whether the upload may come without it.
        form: the joint property of the numbers, up to the wire's rounding: "gram" (the sum of h h' over samples, so
            symmetric and positive semidefinite), "noisy gram" (a Gram matrix with noise), "packed grams" (one column
            per Gram matrix, its upper triangle by rows), "orthonormal" (columns), "descending", "distinct"; "": none.
        per_sample: the most that one sample adds to a value, in absolute terms; None: unknown.
        of: for sums over samples, the name of the Gram matrix of the same samples; "": there is none.
        by: for these sums, the name of the field with the numbers of samples, one per column or one for all; "": the
            numbers that the client announced.
        speaks_for: which samples a field of counts refers to: "task" (the client's samples of the current task), "run"
            (those of all tasks so far), "" (it counts something else).
        widest: the most columns of a matrix whose columns the sender chooses; None: no bound.
        among: the only values that may occur; None: no such list.
        noise: standard deviation of the noise that clients add to each number (see `protocol.dp_mechanism`); 0: none.
        added: whether the server does nothing with it but add it up, so that it may be absorbed in the narrower
            floating-point type in which it travelled.
    """

    shape: tuple[Side, ...]
    kind: str = "real"
    least: float | None = None
    below: int | None = None
    optional: bool = False
    most: float | None = field(default=None, kw_only=True)
    form: str = field(default="", kw_only=True)
    per_sample: float | None = field(default=None, kw_only=True)
    of: str = field(default="", kw_only=True)
    by: str = field(default="", kw_only=True)
    speaks_for: str = field(default="", kw_only=True)
    widest: int | None = field(default=None, kw_only=True)
    among: frozenset[int] | None = field(default=None, kw_only=True)
    noise: float = field(default=0.0, kw_only=True)
    added: bool = field(default=False, kw_only=True)

    # These follow from the fields above, and every upload is looked at by them.
    @cached_property
    def joint(self) -> bool:
        """Whether its numbers are looked at jointly, or in relation to other fields, and not only one by one."""
        return self.kind == "whole" or self.per_sample is not None or bool(self.form or self.of)

    @cached_property
    def around_zero(self) -> float:
        """Up to which size all real numbers of either sign are in range, if no other bound matters; 0: none is."""
        if self.kind != "real" or self.below is not None or self.widest is not None:
            return 0.0
        below = math.inf if self.least is None else -self.least
        above = math.inf if self.most is None else self.most
        return max(0.0, min(below, above))

    @cached_property
    def from_zero(self) -> bool:
        """Whether all real numbers from 0 on are in range, and no others."""
        return self.kind == "real" and self.least == 0 and self.below is self.widest is self.most is None


Schema = Mapping[str, Field]


@dataclass(frozen=True)
class SampleCounts:
    """How many samples a client has, as it said before the task began: of the task, and of all tasks so far."""

    task: int
    run: int


def real(*shape: Side, least: float | None = None, optional: bool = False, **known: Any) -> Field:
    """Finite floating-point numbers; `known` are further attributes of `Field`."""
    return Field(shape, "real", least, None, optional, **known)


def gram_matrix(side: Side, least: float | None = None, **known: Any) -> Field:
    """The sum of h h' over samples: symmetric and positive semidefinite; `least` is 0 where no h is negative."""
    return Field((side, side), "real", least, form="gram", **known)


def whole_or_diagonal(sides: Sequence[int]) -> Field:
    """A Gram matrix, or its diagonal (one side)."""
    return gram_matrix(sides[0]) if len(sides) == 2 else real(*sides, least=0)


def orthonormal(rows: Side, columns: Side, widest: int | None = None) -> Field:
    """Orthonormal columns."""
    return Field((rows, columns), "real", form="orthonormal", widest=widest)


def descending(length: Side) -> Field:
    """Singular values: 0 or more, the largest first."""
    return Field((length,), "real", 0, form="descending")


def counts(*shape: Side, optional: bool = False, speaks_for: str = "task") -> Field:
    """Whole numbers, 0 or more; their sum is at most the number of samples that they count."""
    return Field(shape, "whole", 0, None, optional, speaks_for=speaks_for)


def numbers(*shape: Side, below: int, optional: bool = False) -> Field:
    """Numbers of classes, tasks and the like: 0 to `below` - 1."""
    return Field(shape, "whole", 0, below, optional)


def class_numbers(*shape: Side, among: Collection[int], distinct: bool = False) -> Field:
    """Numbers of some classes."""
    return Field(shape, "whole", form="distinct" if distinct else "", among=frozenset(among))


def images(*shape: Side) -> Field:
    """Pixels in uint8."""
    return Field(shape, "bytes")


def weights(*shape: Side) -> Field:
    """Weights of a network."""
    return real(*shape, least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT)


def like(tensors: Mapping[str, torch.Tensor]) -> dict[str, Field]:
    """Weights of a network with the names and shapes of these; no variance of a batch norm is negative."""
    found = {name: weights(*tensor.shape) for name, tensor in tensors.items()}
    return {name: replace(own, least=0) if name.endswith("running_var") else own for name, own in found.items()}
