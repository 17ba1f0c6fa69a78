"""How a node of a tree combines several uploads into one, which the server absorbs in their place.

A node's message has the form of an upload: it has the same fields, and the server checks it in the same way. It equals
the upload of one client that holds the samples of all of them, up to rounding and up to what the method declares to be
an approximation. `Message.clients` is their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from fcl_bench.protocol.fields import MEAN, SUM, Uploads
from fcl_bench.protocol.message import Message

#: Combines two or more uploads of one stage, decoded and validated, in order of their clients, into one upload.
Combination = Callable[[Sequence[Message]], Message]


def as_declared(declared: Uploads, weighting: str) -> Combination | None:
    """The combination of uploads all of whose fields are declared as SUM or MEAN; None: some are not.

    Args:
        weighting: of means: "samples" or "uniform" (by clients).
    """

    fields = [field for schema in declared.declared.values() for field in schema.values()]
    if any(field.combine not in (SUM, MEAN) for field in fields):
        return None

    def combined(uploads: Sequence[Message]) -> Message:
        holders = {name: [own for own in uploads if name in own] for upload in uploads for name in upload}
        tensors = {}
        for name, held in holders.items():
            field = declared.field(uploads[0].stage, name)
            adds_up = field is not None and field.combine == SUM
            tensors[name] = total(held, name) if adds_up else mean(held, name, weighting)
        return as_one(uploads, tensors)

    return combined


def total(uploads: Sequence[Message], name: str) -> torch.Tensor:
    """The sum of one field, added in order. A client that leaves it out adds zero."""
    found = uploads[0][name].clone()
    for upload in uploads[1:]:
        found += upload[name]
    return found


def mean(uploads: Sequence[Message], name: str, weighting: str) -> torch.Tensor:
    """The weighted mean of one field in float32, added up in float64."""
    weights = [upload.weight(weighting) for upload in uploads]
    sums = uploads[0][name].double() * weights[0]
    for weight, upload in zip(weights[1:], uploads[1:], strict=True):
        sums.add_(upload[name].double(), alpha=weight)
    return (sums / sum(weights)).float()


def as_one(uploads: Sequence[Message], tensors: Mapping[str, torch.Tensor]) -> Message:
    """One upload with these tensors that stands for several; its samples and clients are the sums of theirs."""
    reported = [upload.samples for upload in uploads if upload.samples is not None]
    return dataclasses.replace(
        uploads[0],
        tensors=tensors,
        samples=sum(reported) if len(reported) == len(uploads) else None,
        clients=sum(upload.clients for upload in uploads),
    )
