"""The clients of a run, and what stands between them and the loop: a run's options, composed in one place.

An option is imported where it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fcl_bench.config import Settings
from fcl_bench.engine.codec import Middleware
from fcl_bench.engine.transport import Clients, Transport
from fcl_bench.engine.validation import OptionStep
from fcl_bench.options.none import NoOption
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import Uploads
from fcl_bench.protocol.method import Method

if TYPE_CHECKING:
    from fcl_bench.execution.plan import Plan


def clients_of(plan: Plan) -> Clients:
    """The clients of the run, as both ends derive them from the same settings."""
    settings, dealt = plan.settings, plan.dealt
    classes = [task.columns for task in dealt.stream.tasks] if dealt.dataset.elsewhere else []
    return Clients(
        method=settings.method,
        context=plan.context,
        holdings=dealt.shards,
        columns=dealt.stream.train_columns,
        labelled=dealt.labelled,
        middleware=_client_middleware(plan),
        run=plan.id,
        config=settings.resolved,
        classes=classes,
        parallel=settings.scalars.parallel_clients,
        prepared=plan.prepares,
    )


def _client_middleware(plan: Plan) -> Sequence[Middleware]:
    """What uploads pass through at the clients before the wire codec: noise, and then masks over what is noisy."""
    settings, context = plan.settings, plan.context
    noise = settings.noise.middleware(settings.method, context, settings.scalars.tasks)
    return [*noise, *masking(settings, context, plan.id)]


def masking(settings: Settings, context: Context, run: str) -> Sequence[Middleware]:
    """The clients' side of secure sums, if there is any."""
    if isinstance(settings.secure, NoOption):
        return ()
    from fcl_bench.options.secure.party import Parties, from_the_system, simulated

    secrets = simulated(context.seed, run) if settings.simulates_sums else from_the_system
    uploads = Uploads.of(settings.method, context)
    return [Parties(settings.secure, secrets, uploads, context.wire.gram == "packed")]


def wrapped(transport: Transport, method: Method, context: Context, settings: Settings) -> Transport:
    """The transport with clients that fail, and sums in place of uploads."""
    if not isinstance(settings.faults, NoOption):
        from fcl_bench.options.faults.choices import Faulty

        transport = Faulty(transport, settings.faults, context.seed)
    if not isinstance(settings.secure, NoOption):
        from fcl_bench.options.secure.transport import SummingTransport

        open_stages = Uploads.of(method, context).open_stages()
        transport = SummingTransport(transport, settings.secure, context.seed, open_stages)
    return transport


def exchange_steps(method: Method, context: Context, settings: Settings) -> list[OptionStep]:
    """What happens to answers between the transport and the server."""
    found: list[OptionStep] = []
    if not isinstance(settings.secure, NoOption):
        from fcl_bench.options.secure.transport import SummedUploads

        found.append(lambda accounting, validation: SummedUploads(accounting, context))
    groups, share = settings.scalars.robust_groups, settings.scalars.client_share
    if groups or share < 1:
        from fcl_bench.options.robust import RobustSums

        found.append(lambda accounting, validation: RobustSums(method, context, validation, groups, share))
    fan_in = settings.transport.fan_in
    if fan_in is not None:
        from fcl_bench.options.tree.tree import Tree

        clients = settings.scalars.clients
        found.append(lambda accounting, validation: Tree(clients, fan_in, method, context, validation))
    return found
