"""What receivers of broadcasts keep: it is sent, and counted, only once."""

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
        #: The last broadcast, and what it costs a receiver who keeps these names: bytes, and what is kept afterwards.
        self._sent: Message | None = None
        self._costs: dict[frozenset[str], tuple[int, frozenset[str]]] = {}

    def send(self, receiver: int, broadcast: Message) -> int:
        """Bytes that `broadcast` costs this receiver, who has them from now on."""
        if broadcast is not self._sent:
            self._sent, self._costs = broadcast, {}
            self._forget(frozenset(broadcast) - frozenset(broadcast.kept))
        if not broadcast.kept:
            return broadcast.nbytes
        there = self.names.get(receiver, frozenset())
        if there not in self._costs:
            # Most of many receivers have the same; they share one set, too.
            self._costs[there] = broadcast.nbytes_without(there), there | frozenset(broadcast.kept)
        size, self.names[receiver] = self._costs[there]
        return size

    def _forget(self, changing: frozenset[str]) -> None:
        """What changes again, such as class weights whose classes are back, is not what anyone has of its name."""
        left = {there: there - changing for there in set(self.names.values())}
        self.names = {receiver: left[there] for receiver, there in self.names.items()}

    def state(self) -> dict[str, Any]:
        """As JSON; receivers that keep the same share one list of names."""
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
