"""What follows from the fields that a method declares of its uploads, for whoever handles uploads of any method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from fcl_bench.protocol.fields import CLASSES, EACH, MEAN, MOMENTS, OPEN, SUM, SUMS, Field, Schema
from fcl_bench.protocol.message import Message

if TYPE_CHECKING:
    from fcl_bench.protocol.context import Context
    from fcl_bench.protocol.method import Method


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
        """The uploads of a method in a run."""
        return cls(method.uploads(context))

    def field(self, stage: str, name: str) -> Field | None:
        """What is declared of one tensor of an upload; None: nothing."""
        key = stage, name
        if key not in self._found:
            self._found[key] = declared_field(self.declared.get(stage, {}), name)
        return self._found[key]

    def sent(self, upload: Message) -> Iterator[tuple[str, Field]]:
        """The declared fields among an upload's tensors."""
        for name in upload:
            if (found := self.field(upload.stage, name)) is not None:
                yield name, found

    def has_forms(self, stage: str) -> bool:
        """Whether the wire may give a field of the stage a form of its own: packed, in 8 bits, or held columns."""
        fields = self.declared.get(stage, {}).values()
        return any(own.unit or own.form == "gram" or own.columns == CLASSES for own in fields)

    def groups(self, upload: Message, labels: torch.Tensor) -> dict[str, dict[str, torch.Tensor | None]]:
        """For SUMS and for MOMENTS, the fields of an upload, and which sum each of its samples is in.

        Args:
            upload: as the client half made it.
            labels: (n,) classes of the samples that it is of.
        """
        found: dict[str, dict[str, torch.Tensor | None]] = {SUMS: {}, MOMENTS: {}}
        for name, own in self.sent(upload):
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

    def needed_each(self) -> tuple[str, str] | None:
        """Stage and name of a field that the server needs of each client by itself; None: of no field."""
        for stage, schema in self.declared.items():
            for name, own in schema.items():
                if own.combine == EACH:
                    return stage, name
        return None

    def open_stages(self) -> frozenset[str]:
        """The stages that secure sums leave unmasked."""
        every = self.declared.items()
        return frozenset(stage for stage, schema in every if any(own.combine == OPEN for own in schema.values()))

    def can_be_combined(self) -> bool:
        """Whether a node of a tree may make one upload of several, in every stage."""
        return all(own.combine in (SUM, MEAN) for schema in self.declared.values() for own in schema.values())


def declared_field(schema: Schema, name: str) -> Field | None:
    """What a schema declares of a name, by itself or by the beginning of it."""
    if name in schema:
        return schema[name]
    fitting = [own for own in schema if own.endswith("*") and name.startswith(own[:-1])]
    return schema[max(fitting, key=len)] if fitting else None
