"""The fields of uploads: what a method declares of them once, and what follows from it for any method.

The engine checks every upload against its fields; nothing else is absorbed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fcl_bench.errors import UserError, kind_of
from fcl_bench.protocol.message import Message

if TYPE_CHECKING:
    from fcl_bench.protocol.context import Context
    from fcl_bench.protocol.method import Method

#: The length of a side of a tensor: a number, or a name. `Method.sizes` and the task say which lengths some names have
#: ("c": classes of the task; "d": features of a sample); the sender chooses the others. The same name means the same
#: length wherever it stands in one upload.
Side = int | str

#: `Field.combine`: what the server needs of a round's uploads. SUM: their sum. MEAN: the mean of models, weighted by
#: `Message.samples` or by clients. EACH: each upload by itself, so that secure sums are refused. OPEN: each by itself,
#: and secure sums leave it unmasked.
SUM, MEAN, EACH, OPEN = "sum", "mean", "each", "open"
#: `Field.one_sample`: what one sample, h of class y, adds to the field: h h', h in the column of y, 1 at y.
SQUARE, COLUMN, COUNT = "square", "column", "count"
#: `Field.columns`: a column for each class of the task, in order.
CLASSES = "classes"
#: `Field.leaks`: what the field holds of samples. A sum (or mean, or second moment) of one sample tells that sample.
SUMS, MOMENTS = "sums", "moments"

#: No weight of a network is larger. A training that diverges reaches such numbers too; its client, which knows the step
#: size, reports it once they are no longer finite.
LARGEST_WEIGHT = 1e30


@dataclass(frozen=True)
class Field:
    """One tensor of an upload. Validation, wire forms, secure sums, trees, noise and leakage counts follow from it.

    Attributes:
        shape: its sides; a text such as "M c" stands for ("M", "c").
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
        longest: the most that the features of a sample are long, which bounds sums over samples; None: no bound.
        shift: what a client adds to the diagonal of a Gram matrix besides its samples.
        of: for sums over samples, the name of the Gram matrix of the same samples; "": there is none.
        by: for these sums, the name of the field with the numbers of samples, one per column or one for all; "": the
            numbers that the client announced.
        speaks_for: which samples a field of counts refers to: "task" (the client's samples of the current task), "run"
            (those of all tasks so far), "" (it counts something else).
        widest: the most columns of a matrix whose columns the sender chooses; None: no bound.
        among: the only values that may occur; None: no such list.
        noise: standard deviation of the noise that clients add to each number (see `options.noise.mechanism`); 0: none.
        added: whether the server only adds it up, so that it may be absorbed in the narrower type of the wire.
        combine: what the server needs of a round's uploads: SUM, MEAN, EACH, OPEN.
        otherwise: the knobs with which EACH would not be needed, for the message that refuses secure sums.
        one_sample: what one sample adds to it, if that is all that a sample changes: SQUARE, COLUMN, COUNT; "": its
            effect has no known bound.
        columns: CLASSES: it has a column for each class of the task, of which `wire.columns=held` sends those that are
            not zero; "": it has not.
        unit: whether its columns are unit vectors, which `wire.factors=int8` sends in 8 bits.
        leaks: SUMS or MOMENTS of samples; "": neither, so that single samples cannot be read off. By default what
            `one_sample` says.
        zero_without: the name of the field of counts that says how many samples each of its columns is of: a column of
            no sample is zero; "": there is none.
    """

    shape: tuple[Side, ...]
    kind: str = "real"
    least: float | None = None
    below: int | None = None
    optional: bool = False
    most: float | None = field(default=None, kw_only=True)
    form: str = field(default="", kw_only=True)
    per_sample: float | None = field(default=None, kw_only=True)
    longest: float | None = field(default=None, kw_only=True)
    shift: float = field(default=0.0, kw_only=True)
    of: str = field(default="", kw_only=True)
    by: str = field(default="", kw_only=True)
    speaks_for: str = field(default="", kw_only=True)
    widest: int | None = field(default=None, kw_only=True)
    among: frozenset[int] | None = field(default=None, kw_only=True)
    noise: float = field(default=0.0, kw_only=True)
    added: bool = field(default=False, kw_only=True)
    combine: str = field(default=EACH, kw_only=True)
    otherwise: str = field(default="", kw_only=True)
    one_sample: str = field(default="", kw_only=True)
    columns: str = field(default="", kw_only=True)
    unit: bool = field(default=False, kw_only=True)
    leaks: str = field(default="", kw_only=True)
    zero_without: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.shape, str):
            sides = tuple(int(side) if side.isdigit() else side for side in self.shape.split())
            object.__setattr__(self, "shape", sides)
        if not self.leaks and self.one_sample != COUNT:
            object.__setattr__(self, "leaks", {SQUARE: MOMENTS, COLUMN: SUMS}.get(self.one_sample, ""))

    def sized(self, sizes: Mapping[str, int]) -> Field:
        """The field with the lengths that are known in place of their names."""
        shape = tuple(sizes.get(side, side) if isinstance(side, str) else side for side in self.shape)
        return self if shape == self.shape else replace(self, shape=shape)

    @cached_property
    def joint(self) -> bool:
        """Whether its numbers are looked at jointly, or in relation to other fields, and not only one by one."""
        bounded = self.per_sample is not None or self.longest is not None
        return self.kind == "whole" or bounded or bool(self.form or self.of or self.zero_without)


#: The fields of an upload by name. A name that ends with "*" stands for all names that begin like it, such as those of
#: a network's weights.
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


def orthonormal(rows: Side, columns: Side, widest: int | None = None, **known: Any) -> Field:
    """Orthonormal columns."""
    return Field((rows, columns), "real", form="orthonormal", widest=widest, **known)


def descending(length: Side) -> Field:
    """Singular values: 0 or more, the largest first."""
    return Field((length,), "real", 0, form="descending")


def counts(*shape: Side, optional: bool = False, speaks_for: str = "task", **known: Any) -> Field:
    """Whole numbers, 0 or more; their sum is at most the number of samples that they count."""
    return Field(shape, "whole", 0, None, optional, speaks_for=speaks_for, **known)


def numbers(*shape: Side, below: int | None = None, optional: bool = False, **known: Any) -> Field:
    """Numbers of classes, tasks and the like: 0 to `below` - 1."""
    return Field(shape, "whole", 0, below, optional, **known)


def class_numbers(*shape: Side, distinct: bool = False, **known: Any) -> Field:
    """Numbers of some classes."""
    return Field(shape, "whole", form="distinct" if distinct else "", **known)


def images(*shape: Side, **known: Any) -> Field:
    """Pixels in uint8."""
    return Field(shape, "bytes", **known)


def weights(*shape: Side, **known: Any) -> Field:
    """Weights of a network."""
    return real(*shape, least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT, **known)


def like(tensors: Mapping[str, torch.Tensor], declared: Field) -> dict[str, Field]:
    """A field for each of these tensors, of its shape; no variance of a batch norm is negative."""
    found = {name: replace(declared, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    return {name: replace(own, least=0) if name.endswith("running_var") else own for name, own in found.items()}


class Uploads:
    """The declared fields, by stage and name.

    Args:
        declared: the fields of an upload of each stage, as `Method.uploads` returns them.
    """

    def __init__(self, declared: Mapping[str, Schema]) -> None:
        self.declared = declared
        self._found: dict[tuple[str, str], Field | None] = {}

    @classmethod
    def of(cls, method: Method, context: Context) -> Uploads:
        """The uploads of a method in a run. Raises a `UserError` where something else than a field is declared."""
        declared = method.uploads(context)
        for stage, schema in declared.items():
            for name, own in schema.items():
                if not isinstance(own, Field):
                    raise UserError(
                        f"{type(method).__name__}.uploads: {name} of the stage {stage} is {kind_of(own)}",
                        'a field, such as gram_matrix("M")',
                    )
        return cls(declared)

    def field(self, stage: str, name: str) -> Field | None:
        """What is declared of one tensor of an upload; None: nothing."""
        key = stage, name
        if key not in self._found:
            self._found[key] = declared_field(self.declared.get(stage, {}), name)
        return self._found[key]

    def sent(self, upload: Message, stage: str) -> Iterator[tuple[str, Field]]:
        """The declared fields among the tensors of an upload of a stage."""
        for name in upload:
            if (found := self.field(stage, name)) is not None:
                yield name, found

    def has_forms(self, stage: str) -> bool:
        """Whether the wire may give a field of the stage a form of its own: packed, in 8 bits, or held columns."""
        fields = self.declared.get(stage, {}).values()
        return any(own.unit or own.form == "gram" or own.columns == CLASSES for own in fields)

    @cached_property
    def leak(self) -> bool:
        """Whether any field holds sums or moments of samples."""
        return any(own.leaks for schema in self.declared.values() for own in schema.values())

    def groups(self, upload: Message, stage: str, labels: torch.Tensor) -> dict[str, dict[str, torch.Tensor | None]]:
        """For SUMS and for MOMENTS, the fields of an upload, and which sum each of its samples is in.

        Args:
            labels: (n,) classes of the samples that it is of.
        """
        found: dict[str, dict[str, torch.Tensor | None]] = {SUMS: {}, MOMENTS: {}}
        for name, own in self.sent(upload, stage):
            if own.leaks:
                by_class = labels if own.columns == CLASSES else None
                found[own.leaks][name] = upload.groups.get(name, by_class)
        return found

    def one_sample(self) -> dict[str, str]:
        """What one sample adds to each field; empty where uploads hold anything else, which noise would not cover."""
        fields = {name: own for schema in self.declared.values() for name, own in schema.items()}
        bounded = len(self.declared) == 1 and all(own.one_sample for own in fields.values())
        return {name: own.one_sample for name, own in fields.items()} if bounded else {}

    @property
    def only_models(self) -> bool:
        """Whether clients send nothing but models, of which the server takes the mean."""
        return all(own.combine == MEAN for schema in self.declared.values() for own in schema.values())

    def needed_each(self) -> tuple[str, str, str] | None:
        """Stage and name of a field that the server needs of each client, and what else would work; None: of no field.

        A field with a remedy comes before others.
        """
        found = [
            (stage, name, own.otherwise)
            for stage, schema in self.declared.items()
            for name, own in schema.items()
            if own.combine == EACH
        ]
        return max(found, key=lambda each: bool(each[2]), default=None)

    def open_stages(self) -> frozenset[str]:
        """The stages that secure sums leave unmasked."""
        every = self.declared.items()
        return frozenset(stage for stage, schema in every if any(own.combine == OPEN for own in schema.values()))


#: Of messages whose fields are all alike to the wire.
UNDECLARED = Uploads({})


def declared_field(schema: Schema, name: str) -> Field | None:
    """What a schema declares of a name, by itself or by the beginning of it."""
    if name in schema:
        return schema[name]
    fitting = [own for own in schema if own.endswith("*") and name.startswith(own[:-1])]
    return schema[max(fitting, key=len)] if fitting else None
