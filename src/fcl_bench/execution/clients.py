"""The clients of a run and of its first stage, as both ends derive them from the same settings."""

from __future__ import annotations

from collections.abc import Sequence

from fcl_bench.engine.clients import Clients
from fcl_bench.engine.middleware import Middleware
from fcl_bench.execution.plan import Plan
from fcl_bench.options.secure.base import SecureSums
from fcl_bench.protocol.uploads import Uploads


def clients_of(plan: Plan) -> Clients:
    """The clients of the run itself. What messages pass through on their side belongs here: `middleware`."""
    settings, dealt = plan.settings, plan.dealt
    classes = [task.columns for task in dealt.stream.tasks] if dealt.dataset.elsewhere else []
    return Clients(
        method=settings.method,
        context=plan.context,
        holdings=dealt.shards,
        columns=dealt.stream.train_columns,
        labelled=dealt.labelled,
        middleware=_middleware(plan),
        run=plan.id,
        config=settings.resolved,
        classes=classes,
        parallel=settings.scalars.parallel_clients,
        prepared=plan.prepares,
    )


def _middleware(plan: Plan) -> Sequence[Middleware]:
    """Noise, and then masks over what is noisy."""
    settings, context = plan.settings, plan.context
    steps = [*settings.noise.middleware(settings.method, context, settings.scalars.tasks)]
    if isinstance(settings.secure, SecureSums):
        # Imported here, since the packages that it needs are installed only for secure sums.
        from fcl_bench.options.secure.party import Parties, seeded

        uploads = Uploads.of(settings.method, context)
        steps.append(Parties(settings.secure, seeded(context.seed), uploads, context.wire.gram == "packed"))
    return steps
