"""How a step's prompt tokens are divided under `--prefill-policy fair`.

Imports pace and Request. Invariant: nobody is given more than it wants, no token is left over while somebody wants it,
and where a step is too small for all shares they take turns, whatever newcomers there are.

The shares are those of processor sharing: each tenant, and each request without one, gets an equal part of every step,
and where the parts would be too small they take turns. Within a share the order is highest response ratio next, waited
/ needed (Brinch Hansen 1971): shortest remaining first, with ageing and without a constant to choose.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longfill.request import Request
from longfill.scheduler.pace import QUANTUM

Share = tuple[str, str]
"""What has a share, and its name: a tenant, or a request that has none."""
LATE_PART = 0.75
"""Of a step's prompt tokens, at most so many go to late prompts while others want some."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A request that could compute up to `tokens` prompt tokens in this step."""

    request: Request
    tokens: int
    urgency: float = 0.0
    """How long it has waited over how long it still needs."""
    is_late: bool = False


class FairShares:
    """Whose turn it is, by share."""

    def __init__(self) -> None:
        self._turns = itertools.count()
        self._last_turn: dict[Share, int] = {}
        self._newcomer_was_first = False

    def split(self, budget: int, claims: Sequence[Claim], *, for_others: int | None = None) -> list[Claim]:
        """Divide `budget` tokens: a claim for each request that gets some, late ones first, then share by share.

        Late ones are served in the order of their arrival, whatever their shares; the others get `for_others` tokens at
        most. Where equal parts of all shares would be less than a QUANTUM, only some get one. `was_served` has to be
        told what came of it.
        """
        self._forget_turns({_share(claim.request) for claim in claims})
        late = sorted((claim for claim in claims if claim.is_late), key=lambda claim: claim.request.arrival_time)
        others = [claim for claim in claims if not claim.is_late]
        for_others = budget if for_others is None else for_others
        for_late = max(int(LATE_PART * budget), budget - min(for_others, sum(claim.tokens for claim in others)))
        given: list[Claim] = []
        for claim in late:
            given.append(Claim(claim.request, min(claim.tokens, for_late)))
            for_late -= given[-1].tokens
        left = budget - sum(claim.tokens for claim in given)
        given += self._by_share(min(left, for_others), others)
        return [claim for claim in given if claim.tokens]

    def was_served(self, request: Request) -> None:
        """Note that a request got tokens: its share is behind all others now."""
        self._last_turn[_share(request)] = next(self._turns)

    def _by_share(self, budget: int, claims: Sequence[Claim]) -> list[Claim]:
        """Divide `budget` into equal parts of the shares."""
        if budget == 0:
            return []
        shares: dict[Share, list[Claim]] = {}
        for claim in sorted(claims, key=lambda claim: -claim.urgency):
            shares.setdefault(_share(claim.request), []).append(claim)
        wanted = {share: sum(claim.tokens for claim in members) for share, members in shares.items()}
        given = []
        for share, tokens in water_fill(budget, self._whose_turn(budget, wanted)).items():
            for claim in shares[share]:
                part = min(claim.tokens, tokens)
                given.append(Claim(claim.request, part))
                tokens -= part
        return given

    def _whose_turn(self, budget: int, wanted: dict[Share, int]) -> dict[Share, int]:
        """The shares that get a part: as many as there are QUANTUMs, and more while those leave some tokens.

        Those that were never served, in the order they come in `wanted`, and those that were, least recently first, do
        so by turns: the former start soon however many run, the latter go on however many arrive.
        """
        most = max(1, budget // QUANTUM)
        if len(wanted) <= most:
            return wanted
        new = [share for share in wanted if share not in self._last_turn]
        old = sorted(wanted.keys() - set(new), key=lambda share: self._last_turn[share])
        order = _alternate(old, new) if self._newcomer_was_first else _alternate(new, old)
        if new and old:
            self._newcomer_was_first = not self._newcomer_was_first
        chosen: dict[Share, int] = {}
        while len(chosen) < len(wanted) and (len(chosen) < most or sum(chosen.values()) < budget):
            share = next(order)
            chosen[share] = wanted[share]
        return chosen

    def _forget_turns(self, active: set[Share]) -> None:
        """A share that is gone is new when it comes back, but not before all that want tokens now had their turn."""
        oldest = min((turn for share, turn in self._last_turn.items() if share in active), default=math.inf)
        self._last_turn = {
            share: turn
            for share, turn in self._last_turn.items()
            if share in active or (share[0] == "tenant" and turn > oldest)
        }


def water_fill(budget: int, wanted: dict[Share, int]) -> dict[Share, int]:
    """Equal parts of `budget`, what one does not want going to the others; in the order of `wanted`."""
    given = dict.fromkeys(wanted, 0)
    left = len(wanted)
    for share in sorted(wanted, key=lambda share: wanted[share]):
        given[share] = min(wanted[share], -(-budget // left))
        budget -= given[share]
        left -= 1
    return given


def _alternate(first: Sequence[Share], second: Sequence[Share]) -> Iterator[Share]:
    for pair in itertools.zip_longest(first, second):
        yield from (share for share in pair if share is not None)


def _share(request: Request) -> Share:
    return ("tenant", request.tenant) if request.tenant else ("request", request.request_id)
