"""Sums over clients that few of them cannot move far: medians of means (Minsker, 2015), and bounds on clients' shares.

With `client_share` c, a client of n_k samples counts as n'_k = min(n_k, t), for the largest t with n'_k <= c sum n'_j:
its upload is multiplied by n'_k / n_k. Clients are dealt out at random to `robust_groups` groups, with sums S_g of them
and N_g of n'_k. In place of sum_g S_g the server absorbs N m, with N = sum_g N_g, m = argmin sum_g N_g |S_g / N_g - m|,
and |x|^2 a sum over fields, each in units of its median length. m is a mean of the S_g / N_g with weights that are the
same for all fields and never negative, so sums of Gram matrices stay positive semidefinite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from fcl_bench.config import Settings
from fcl_bench.engine.exchange import Round, Step, Turn
from fcl_bench.engine.validation import Validation
from fcl_bench.errors import UserError
from fcl_bench.protocol.combining import as_one
from fcl_bench.protocol.context import Context
from fcl_bench.protocol.fields import OPEN, SUM, Uploads
from fcl_bench.protocol.message import Message
from fcl_bench.protocol.method import EVERYONE, Method
from fcl_bench.randomness import generator

#: Iterations of Weiszfeld's algorithm; the least distance that it divides by, in typical lengths of a mean.
_ITERATIONS, _NEAR = 300, 1e-9


def require_sums(settings: Settings, context: Context) -> None:
    """Raise a `UserError` where there is no robust sum."""
    groups, share, clients = settings.scalars.robust_groups, settings.scalars.client_share, settings.scalars.clients
    fields = [own for schema in Uploads.of(settings.method, context).declared.values() for own in schema.values()]
    sums = all(own.combine in (SUM, OPEN) and not own.optional for own in fields)
    hidden = "secure=sums" if settings.secure.sums else "transport=tree" if settings.transport.fan_in else ""
    small = "robust_groups=0 or 3 to clients, and client_share of 1/clients or more"
    summing = "method=stsa, or afl with method.upload=sums; for models method.training.aggregate=median"
    for wrong, what, remedy in (
        ((groups and not 3 <= groups <= clients) or share * clients < 1, f"clients={clients}", small),
        (not sums, f"method={settings.method.name}: not all of its uploads add up", summing),
        (hidden, f"{hidden}: the server sees no client's upload by itself", "one of the two"),
        (
            settings.transport.withdrawal,
            "transport.withdrawal=true: of a robust sum no client can be taken out",
            "one of the two",
        ),
        (getattr(settings.faults, "late", None), "faults.late: a late upload is in no group", "no late uploads"),
    ):
        if wrong:
            raise UserError(f"robust_groups={groups} client_share={share:g} with {what}", remedy)


def most_samples(samples: Sequence[float], share: float) -> float:
    """t, so that no min(n_k, t) is more than `share` of their sum; the least n_k where there is none."""
    descending = sorted(samples, reverse=True)
    for above, largest in enumerate(descending):  # t where so many n_k are above it
        rest = 1 - share * above
        if rest > 0 and (bound := share * sum(descending[above:]) / rest) >= largest:
            return bound
    return descending[-1]


def median_factors(fields: Iterable[torch.Tensor], samples: torch.Tensor) -> torch.Tensor:
    """(B,) by what the S_g are multiplied so that they add up to N m, of the S_g (B, numbers) of each field and N_g."""
    products = samples.new_zeros(len(samples), len(samples))
    for field in fields:
        means = field / samples[:, None]
        lengths = torch.linalg.vector_norm(means, dim=1)
        if lengths.any():
            means /= lengths[lengths > 0].median()
            products += means @ means.T
    weights = shares = samples / samples.sum()
    for _ in range(_ITERATIONS):  # the distances of the means from the weighted mean follow from inner products
        squares = products.diagonal() - 2 * products @ weights + weights @ products @ weights
        weights = torch.nn.functional.normalize(shares / squares.clamp_min(_NEAR**2).sqrt(), p=1, dim=0)
    return weights / shares


class RobustSums(Step):
    """Brings the robust sum of a round's uploads in their place. Stages that are not added up pass."""

    def __init__(self, method: Method, context: Context, validation: Validation, groups: int, share: float) -> None:
        self._uploads, self._seed, self._validation = Uploads.of(method, context), context.seed, validation
        self._groups, self._share = max(groups, 1), share

    def passed(self, round_: Round, turns: Iterator[Turn]) -> Iterator[Turn]:
        if round_.broadcast.stage in self._uploads.open_stages():
            yield from turns
            return
        uploads: dict[int, Message] = {}
        for turn in turns:
            if turn.arrival is not None:
                with round_.watch.running():
                    upload, turn.arrival = self._validation.received(round_, turn), None
                uploads |= {turn.client: upload} if upload is not None else {}
            yield turn
            del turn
        if uploads:
            with round_.watch.running():
                total = self._total(round_, uploads)
            yield Turn(EVERYONE, upload=total, source=next(iter(uploads)))

    def _total(self, round_: Round, uploads: Mapping[int, Message]) -> Message:
        whole, found = as_one([*uploads.values()], next(iter(uploads.values()))), {}
        fields = {name: torch.stack([own[name].flatten().double() for own in uploads.values()]) for name in whole}
        held = torch.from_numpy(round_.held.samples[[*uploads]]).to(next(iter(fields.values())))
        counted = held.clamp_max(most_samples(held.tolist(), self._share))
        places = generator(self._seed, "groups", whole.task, whole.round).permutation(len(uploads)) % self._groups
        grouped = torch.nn.functional.one_hot(torch.from_numpy(places)).to(held)  # (clients, groups)
        parts = grouped * (counted / held)[:, None]
        weights = parts @ median_factors((parts.T @ own for own in fields.values()), counted @ grouped)
        for name, field in self._uploads.sent(whole, whole.stage):
            own = (weights @ fields[name]).view_as(whole[name])
            if field.shift:  # what each client adds to its samples, whatever these count
                own.diagonal().add_(field.shift * (len(weights) - weights.sum()))
            # Counts are whole, and no class that has samples loses all of them.
            own = own.round() + ((own > 0) & (own < 0.5)) if field.kind == "whole" else own
            found[name] = own.to(whole[name])
        return whole.with_tensors(found)
