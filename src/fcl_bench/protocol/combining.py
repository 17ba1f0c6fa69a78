"""How a node of a tree combines several uploads into one, which the server absorbs in their place.

A node's message has the form of an upload: it has the same fields, and the server checks it in the same way. It equals
the upload of one client that holds the samples of all of them, up to rounding and up to what the method declares to be
an approximation. `Message.clients` is their number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from fcl_bench.protocol.message import Message

#: Combines two or more uploads of one stage, decoded and admitted, in order of their clients, into one upload.
Combination = Callable[[Sequence[Message]], Message]


def added_up(uploads: Sequence[Message]) -> Message:
    """The sum of uploads whose fields are all `summed`. A field that some of them leave out counts as zero there.

    Raises:
        TypeError: a field is not `summed`, so the method is wrong to say that its uploads add up.
    """
    holders = {name: [own for own in uploads if name in own] for upload in uploads for name in upload}
    if left := sorted(name for name, held in holders.items() if not all(name in own.summed for own in held)):
        raise TypeError(f"a field of the stage {uploads[0].stage} does not add up: {', '.join(left)}")
    return dataclasses.replace(
        as_one(uploads, {name: total(held, name) for name, held in holders.items()}),
        symmetric=frozenset().union(*(upload.symmetric for upload in uploads)),
        summed=frozenset(holders),
    )


def total(uploads: Sequence[Message], name: str) -> torch.Tensor:
    """The sum of one field, added in order."""
    found = uploads[0][name].clone()
    for upload in uploads[1:]:
        found += upload[name]
    return found


def as_one(uploads: Sequence[Message], tensors: Mapping[str, torch.Tensor]) -> Message:
    """One upload with these tensors that stands for several; its samples and clients are the sums of theirs."""
    told = [upload.samples for upload in uploads if upload.samples is not None]
    return dataclasses.replace(
        uploads[0],
        tensors=tensors,
        samples=sum(told) if len(told) == len(uploads) else None,
        clients=sum(upload.clients for upload in uploads),
    )
