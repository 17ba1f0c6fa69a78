"""The ServerApp: it pushes and pulls messages for the `fcl-bench` command, which has the server's half of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fcl_bench.flower import records
from fcl_bench.flower.frames import REFUSED, Frame, connected, receive, send

app = ServerApp()

#: Flower waits for minutes for the rest of an answer whose node died while it sent: each is pulled beside the others.
_POOL = ThreadPoolExecutor(32)
_PULLS: dict[str, Future[Iterable[Message]]] = {}


@app.main()
def relay(grid: Grid, context: Context) -> None:
    """Do what the command asks until it closes the line."""
    with connected(str(context.run_config["socket"])) as line:
        while (request := receive(line)) is not None:
            send(line, *_done(grid, request))


def _done(grid: Grid, request: Frame) -> Frame:
    """What came of one request: `nodes`, `push` (one message) or `pull` (the replies that are there)."""
    what = request.header
    if what["do"] == "nodes":
        # As text: a node's number takes 64 bits, more than JSON's readers agree on.
        return Frame({"nodes": sorted(str(node) for node in grid.get_node_ids())}, [])
    if what["do"] == "push":
        message = Message(records.content(request.blobs), int(what["node"]), "query", ttl=float(what["ttl"]))
        (number,) = grid.push_messages([message]) or [None]
        return Frame({"message": number}, [])
    replies: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for message in _pulled(grid, what["messages"]):
        own: list[bytes] = []
        error = f"Flower's error {message.error.code}: {message.error.reason}" if message.has_error() else ""
        if not error:
            try:
                own = records.blobs(message.content, what["messages"][message.metadata.reply_to_message_id])
            except records.TooLong as refused:
                error = f"{REFUSED}{refused}"
            except ValueError as damaged:
                error = str(damaged)
        replies.append({"message": message.metadata.reply_to_message_id, "error": error, "blobs": len(own)})
        blobs += own
    return Frame({"replies": replies}, blobs)


def _pulled(grid: Grid, wanted: Iterable[str]) -> Iterator[Message]:
    """The answers that are there to some messages; the others come with a later call."""
    for name in set(wanted) - _PULLS.keys():
        _PULLS[name] = _POOL.submit(grid.pull_messages, [name])
    wait([_PULLS[name] for name in wanted], 0.1)
    for name in wanted:
        if _PULLS[name].done():
            yield from _PULLS.pop(name).result()
