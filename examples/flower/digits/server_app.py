"""The server: what is learnt, and with which method."""

from flwr.app import Context

from digits.task import BODY, load_test, tasks
from fcl_bench.flower import ServerApp


def show(context: Context, learnt) -> None:
    """Called after each task."""
    print("accuracy on each task:", *(f"{accuracy:.1f} %" for accuracy in learnt.matrix[-1]))


app = ServerApp("afl", tasks=tasks, test=load_test, network=BODY, after_task=show)
