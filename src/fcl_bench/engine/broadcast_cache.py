"""Tensors that receivers of broadcasts keep, which are sent, and counted, only once."""

from __future__ import annotations

from typing import Any

from fcl_bench.protocol.message import Message


class Kept:
    """Who keeps which tensors of broadcasts (see `Message.kept`).

    Attributes:
        names: per receiver, the names of the tensors that it keeps. Receivers that keep the same share one set.
    """

    def __init__(self) -> None:
        self.names: dict[int, frozenset[str]] = {}
        #: The last broadcast, and its cost for a receiver that keeps these names: bytes, and the names kept afterwards.
        self._sent: Message | None = None
        self._costs: dict[frozenset[str], tuple[int, frozenset[str]]] = {}

    def send(self, receiver: int, broadcast: Message) -> int:
        """Bytes that `broadcast` costs this receiver, which has the tensors from now on."""
        if broadcast is not self._sent:
            self._sent, self._costs = broadcast, {}
            self._forget(frozenset(broadcast) - frozenset(broadcast.kept))
        if not broadcast.kept:
            return broadcast.nbytes
        there = self.names.get(receiver, frozenset())
        if there not in self._costs:
            # Most receivers keep the same names, so they share one set.
            self._costs[there] = broadcast.nbytes_without(there), there | frozenset(broadcast.kept)
        size, self.names[receiver] = self._costs[there]
        return size

    def _forget(self, changing: frozenset[str]) -> None:
        """Forget tensors that change again, such as weights of classes that come back: no receiver has the new ones."""
        left = {there: there - changing for there in set(self.names.values())}
        self.names = {receiver: left[there] for receiver, there in self.names.items()}

    def state(self) -> dict[str, Any]:
        """Return it as JSON; receivers that keep the same share one list of names."""
        sets = list(dict.fromkeys(self.names.values()))
        number = {names: i for i, names in enumerate(sets)}
        return {
            "kept": [sorted(names) for names in sets],
            "kept_by": {str(receiver): number[names] for receiver, names in self.names.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        sets = [frozenset(names) for names in state["kept"]]
        self.names = {int(receiver): sets[number] for receiver, number in state["kept_by"].items()}
