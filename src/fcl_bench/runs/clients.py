"""The clients of a run and of its first stage, as both ends derive them from the same settings."""

from __future__ import annotations

from fcl_bench.engine.clients import Clients
from fcl_bench.runs.plan import Plan


def clients_of(plan: Plan) -> Clients:
    """The clients of the run itself. What messages pass through on their side belongs here: `middleware`."""
    settings, dealt = plan.settings, plan.dealt
    columns = dealt.stream.train_columns
    classes = [task.columns for task in dealt.stream.tasks] if dealt.dataset.elsewhere else []
    return Clients(
        *(settings.method, plan.problem, dealt.shards, columns, dealt.labelled),
        middleware=settings.noise.middleware(settings.method, plan.problem, settings.scalars.tasks),
        run=plan.id,
        config=settings.resolved,
        classes=classes,
    )
