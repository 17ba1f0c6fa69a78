"""Taking a client out of a model again, which is exact where the server only adds uploads up.

The server keeps no upload, but a receipt of each: its hash. The client, which keeps what it sent, brings it once more,
and only what has the hash of a receipt is subtracted: no client can take out anything else than what it put in.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fcl_bench.engine.blob import packed
from fcl_bench.errors import UserError
from fcl_bench.files import content_hash
from fcl_bench.protocol.context import Context, Task
from fcl_bench.protocol.fields import SUM
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import Method, Server

#: The entry of a checkpoint that has the receipts, and what else it takes to withdraw; a line of a site's ledger.
WITHDRAWAL = "withdrawal"


def receipt(client: int, upload: Message) -> tuple[str, bytes]:
    """The receipt of an upload as it travels, and the bytes that it is of."""
    blob = packed(upload, client=client)
    return content_hash(blob).hexdigest(), blob


def take_out(server: Server, client: int, upload: Message, task: Task) -> None:
    """Subtract an upload of a task, decoded, from a server's sums: one of the opposite sign is absorbed."""
    samples = None if upload.samples is None else -upload.samples
    opposite = replace(upload, tensors={name: -tensor for name, tensor in upload.items()}, samples=samples, clients=-1)
    server.absorb_late(client, opposite, task)


def require_sums(method: Method, context: Context, task: Task, key: str = "transport.withdrawal=true") -> None:
    """Raise a `UserError` unless all that the server keeps are sums of uploads, which then come and go in any order.

    Args:
        task: any one.
        key: what is asked for and needs such sums.
    """
    why, remedy = "", f"without {key}, or a method whose uploads add up: method=stsa"
    stages = method.uploads(context)
    others = [(name, own) for fields in stages.values() for name, own in fields.items() if own.combine != SUM]
    if context.sums:
        why, remedy = "with secure=sums the server never has what one client sent", "secure=none"
    elif context.dtype != torch.float64:
        why, remedy = "sums in dtype=float32 round too much", "dtype=float64"
    elif others or len(stages) > 1 or method.server(context).late_stage(task, 0) is None:
        more = f"its server does more with {others[0][0]} than add" if others else "uploads depend on those of others"
        why = f"the order of uploads matters to method={method.name}, and none can be taken out again: {more}"
        remedy = next((own.otherwise for _, own in others if own.otherwise), remedy)
    if why:
        raise UserError(f"{key}: {why}", remedy)
