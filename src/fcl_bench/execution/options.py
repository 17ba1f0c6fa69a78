"""Where a run's options come in: what stands between the clients and the loop, composed in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fcl_bench.config import Settings
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.transport import Asking, Transport
from fcl_bench.engine.validation import OptionStep
from fcl_bench.options.faults.base import Faults
from fcl_bench.options.faults.transport import Faulty
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.options.tree.tree import Tree
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method


def client_middleware(method: Method, context: Context, settings: Settings) -> Sequence[Middleware]:
    """What uploads pass through at the clients before the wire codec: noise, and then masks over what is noisy."""
    steps = [*settings.noise.middleware(method, context, settings.scalars.tasks)]
    if isinstance(settings.secure, SecureSums):
        # Imported here, since the packages that it needs are installed only for secure sums.
        from fcl_bench.options.secure.party import Parties, seeded

        uploads = Uploads.of(method, context)
        steps.append(Parties(settings.secure, seeded(context.seed), uploads, context.wire.gram == "packed"))
    return steps


def wrapped(transport: Transport, method: Method, context: Context, settings: Settings) -> Transport:
    """The transport with clients that fail, and sums in place of uploads."""
    if isinstance(settings.faults, Faults):
        transport = Faulty(transport, settings.faults, context.seed)
    if isinstance(settings.secure, SecureSums):
        from fcl_bench.options.secure.transport import SummingTransport

        open_stages = Uploads.of(method, context).open_stages()
        transport = SummingTransport(cast(Asking, transport), settings.secure, context.seed, open_stages)
    return transport


def exchange_steps(method: Method, context: Context, settings: Settings) -> list[OptionStep]:
    """What happens to answers between the transport and the server."""
    found: list[OptionStep] = []
    if isinstance(settings.secure, SecureSums):
        from fcl_bench.options.secure.sums import SummedUploads

        found.append(lambda accounting, validation: SummedUploads(accounting, context))
    fan_in = settings.transport.fan_in
    if fan_in is not None:
        clients = settings.scalars.clients
        found.append(lambda accounting, validation: Tree(clients, fan_in, method, context, validation))
    return found
