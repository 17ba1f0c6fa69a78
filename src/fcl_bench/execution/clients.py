"""The clients of a run and of its first stage, as both ends derive them from the same settings."""

from __future__ import annotations

from fcl_bench.engine.transport import Clients
from fcl_bench.execution.options import client_middleware
from fcl_bench.execution.plan import Plan


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
        middleware=client_middleware(settings.method, plan.context, settings),
        run=plan.id,
        config=settings.resolved,
        classes=classes,
        parallel=settings.scalars.parallel_clients,
        prepared=plan.prepares,
    )
