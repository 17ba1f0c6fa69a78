"""The ServerApp: it pushes and pulls messages for the `fcl-bench` command, which has the server's half of the run."""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fcl_bench.flower import records
from fcl_bench.flower.frames import REFUSED, Frame, connected, receive, send
from fcl_bench.flower.pulls import Pulls

app = ServerApp()


@app.main()
def relay(grid: Grid, context: Context) -> None:
    """Do what the command asks until it closes the line."""
    pulls = Pulls(grid)
    with connected(str(context.run_config["socket"])) as line:
        while (request := receive(line)) is not None:
            send(line, *_done(grid, pulls, request))


def _done(grid: Grid, pulls: Pulls, request: Frame) -> Frame:
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
    for message in pulls.answers(what["messages"]):
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
