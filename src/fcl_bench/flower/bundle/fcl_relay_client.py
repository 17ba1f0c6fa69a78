"""The ClientApp: Flower starts it anew for every message, so it only hands the message on to the worker."""

from __future__ import annotations

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fcl_bench.flower import records
from fcl_bench.flower.frames import connected, receive, send

app = ClientApp()


@app.query()
def relay(message: Message, context: Context) -> Message:
    """The worker's answer. A worker that is being started again is waited for until the message's deadline."""
    request = records.blobs(message.content)
    until = message.metadata.created_at + message.metadata.ttl
    while True:
        try:
            answer = _sent(str(context.node_config["socket"]), request)
            break
        except OSError:
            if time.time() > until:
                raise
            time.sleep(0.5)
    return Message(records.content(answer), reply_to=message)


def _sent(socket: str, request: list[bytes]) -> list[bytes]:
    with connected(socket) as line:
        send(line, {}, request)
        answer = receive(line)
    if answer is None:
        raise ConnectionError("the worker went away")
    return answer.blobs
