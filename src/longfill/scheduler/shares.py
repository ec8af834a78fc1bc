"""How a step's prompt tokens are divided under `--prefill-policy fair`.

Imports pace and Request. Invariant: a share that wants tokens is never behind another by more than what one step gives;
nobody is given more than it wants, and no token is left over while somebody wants it.

The shares are those of a processor-sharing queue: each tenant's (and each request's without a tenant) normalised
service is counted, and those with the least go first, as in weighted fair queueing (Demers, Keshav, Shenker 1989).
Within a share the order is highest response ratio next, (waited + needed) / needed (Brinch Hansen 1971): shortest
remaining first, with ageing and without a constant to choose.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from longfill.request import Request
from longfill.scheduler.pace import QUANTUM

UNKNOWN_TOKEN_S = 1e-4
"""Seconds a prompt token takes, until a step has told."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A request that could compute up to `tokens` prompt tokens in this step."""

    request: Request
    tokens: int


class FairShares:
    """Service so far, by share."""

    def __init__(self) -> None:
        self._service: dict[Hashable, int] = {}

    def split(
        self, budget: int, claims: Sequence[Claim], late: Sequence[Claim], now: float, token_s: float | None
    ) -> list[Claim]:
        """Divide `budget` tokens: a claim for each request that gets some, in the order to serve them.

        Those of `claims` that are `late` come first, whatever their shares. Where equal parts of all shares would be
        less than a QUANTUM, only those with the least service get one.
        """
        self._forget_all_but({_share(claim.request) for claim in claims})
        given: list[Claim] = []
        for claim in sorted(late, key=lambda claim: claim.request.arrival_time):
            given.append(Claim(claim.request, min(claim.tokens, budget)))
            self._service[_share(claim.request)] += given[-1].tokens
            budget -= given[-1].tokens
        shares: dict[Hashable, list[Claim]] = {}
        for claim in claims:
            if claim not in late:
                shares.setdefault(_share(claim.request), []).append(claim)
        for members in shares.values():
            members.sort(key=lambda claim: -response_ratio(claim.request, now, token_s))
        order = sorted(shares, key=lambda share: (self._service[share], sum(c.tokens for c in shares[share])))
        order = order[: max(1, budget // QUANTUM)]
        for share, tokens in _water_fill(budget, {share: sum(c.tokens for c in shares[share]) for share in order}):
            self._service[share] += tokens
            for claim in shares[share]:
                part = min(claim.tokens, tokens)
                if part:
                    given.append(Claim(claim.request, part))
                tokens -= part
        return given

    def _forget_all_but(self, active: set[Hashable]) -> None:
        """A share that comes (back) starts level with the least served one: idling saves nothing up."""
        known = {share: service for share, service in self._service.items() if share in active}
        least = min(known.values(), default=0)
        self._service = {share: known.get(share, least) for share in active}


def _share(request: Request) -> Hashable:
    return ("tenant", request.tenant) if request.tenant else ("request", request.request_id)


def response_ratio(request: Request, now: float, token_s: float | None) -> float:
    """How long it has waited over how long it still needs alone: more is more urgent."""
    return (now - request.arrival_time) / (max(1, request.num_uncomputed_tokens) * (token_s or UNKNOWN_TOKEN_S))


def is_late(request: Request, now: float, token_s: float | None, ttft_target: float) -> bool:
    """Whether a prompt that could be computed within the target will miss it at half of the machine's pace."""
    needed = request.num_uncomputed_tokens * (token_s or UNKNOWN_TOKEN_S)
    waited = now - request.arrival_time
    return request.num_output_tokens == 0 and needed <= ttft_target < waited + 2 * needed


def _water_fill(budget: int, wanted: dict[Hashable, int]) -> list[tuple[Hashable, int]]:
    """Equal parts of `budget`, what one does not want going to the others; in the order of `wanted`."""
    given = {}
    left = len(wanted)
    for share in sorted(wanted, key=lambda share: wanted[share]):
        given[share] = min(wanted[share], -(-budget // left))
        budget -= given[share]
        left -= 1
    return [(share, given[share]) for share in wanted]
