"""Clients on other machines, over Flower: a SuperLink here, a SuperNode and a worker at each site.

`ServerApp` and `ClientApp` make a Flower app of a method: docs/how-to/flower_app.md.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcl_bench.flower.app.body import Body
    from fcl_bench.flower.app.client import ClientApp
    from fcl_bench.flower.app.server import ServerApp

__all__ = ["Body", "ClientApp", "ServerApp"]


def __getattr__(name: str) -> Any:
    # Imported only now: the processes that Flower starts for `transport=flower` need neither torch nor these.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("flwr") is None:
        from fcl_bench.errors import UserError, installing

        raise UserError(f"fcl_bench.flower.{name} needs Flower, which is not installed", installing("flower"))
    module = {"Body": "body", "ClientApp": "client", "ServerApp": "server"}[name]
    return getattr(import_module(f"fcl_bench.flower.app.{module}"), name)
