"""The clients: one on each node."""

from digits.task import BODY, load
from fcl_bench.flower import ClientApp

app = ClientApp(load, network=BODY)
