"""Middleware: the steps that messages pass through between the two halves of a method."""

from __future__ import annotations

from collections.abc import Sequence

from fcl_bench.protocol.message import Message


class Middleware:
    """One step on one side, the clients' or the server's: the wire codec, and later clipping, noise, masks, faults.

    Both methods return the message unchanged unless a subclass says otherwise.
    """

    def send(self, message: Message, client: int | None) -> Message:
        """The message that goes on to the other side; `client` is its sender, None: it is a broadcast to all."""
        return message

    def receive(self, message: Message, client: int) -> Message:
        """The message that came from the other side; `client` is the one that sent it, or that receives it."""
        return message

    def answer(self, client: int, request: Message) -> Message | None:
        """What a client's side answers to a request of the server's middleware; None: it knows no such request."""
        return None


class Chain(Middleware):
    """Several steps as one: a message that is sent passes them in order, one that is received in reverse.

    Args:
        steps: from the method outwards; the wire codec comes last.
    """

    def __init__(self, steps: Sequence[Middleware]) -> None:
        self._steps = tuple(steps)

    def send(self, message: Message, client: int | None) -> Message:
        for step in self._steps:
            message = step.send(message, client)
        return message

    def receive(self, message: Message, client: int) -> Message:
        for step in reversed(self._steps):
            message = step.receive(message, client)
        return message

    def answer(self, client: int, request: Message) -> Message | None:
        answers = (step.answer(client, request) for step in self._steps)
        return next((answer for answer in answers if answer is not None), None)
