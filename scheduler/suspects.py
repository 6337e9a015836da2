"""Requests that may kill their worker: which were being computed when one died, which run alone, which are given up.

Nobody sees what a worker died of. What is known: a request that kills it does so at some token of its own, again and
again, and never gets past that token. So a request is suspected of a death as long as it has not been computed past
what it had under way then; several deaths count together only while one token was under way in all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from octavo.scheduler.pipeline import PlanRecord
from octavo.scheduler.sequence import Request, Sequence, Status

ALONE_FROM = 2
"""Deaths in a row after which a request runs alone."""

MAX_DEATHS = 3
"""Deaths in a row after which a request ends: the last of them was its own, since it ran alone."""

MAX_DEATHS_IN_DOUBT = 6
"""The same where workers die of something else as well: a process that is killed now and then would otherwise be laid to
the request that happens to run."""

DOUBT_S = 600.0
"""For so long after a death that no request explains, others are in doubt."""

MAX_OPEN_DEATHS = 64
"""Deaths of which it is still being found out whether a request explains them; older ones are forgotten."""

Span = tuple[int, int]
"""Of a sequence's tokens: from, to before."""


@dataclass(slots=True)
class Suspicion:
    """What a request is suspected of."""

    num_deaths: int
    spans: dict[Sequence, Span]
    """Tokens that were under way at each of the deaths, by sequence (a search: by its first one); never empty."""


@dataclass(slots=True)
class _Death:
    """A loss of a worker; it was a death unless the same process comes back."""

    boot_id: str | None
    """Of the worker, if its return shows that it has not died; None: it hung, or could not be trusted."""
    spans: dict[Request, dict[Sequence, Span]] = field(default_factory=dict)


class Suspects:
    """Deaths of workers, and the live requests that may have caused them.

    The law: whoever is suspected of ALONE_FROM deaths or more runs alone until it is cleared. It is cleared once it has
    been computed past what it had under way at all of these deaths, or when another request is found to be the cause.
    Deaths while nothing was under way are nobody's.
    """

    def __init__(self) -> None:
        self.num_given_up = 0
        self._suspected: dict[Request, Suspicion] = {}
        self._lost: _Death | None = None  # until the next worker shows what it was
        self._open: list[set[Request]] = []  # of each death, whoever may have caused it
        self._unexplained_at: float | None = None

    def __len__(self) -> int:
        return len(self._suspected)

    @property
    def alone(self) -> Request | None:
        """The request that runs alone now: of all that must, one with the fewest deaths, and of these the newest."""
        if not self._suspected:
            return None
        due = [(s.num_deaths, -r.arrival, r) for r, s in self._suspected.items() if s.num_deaths >= ALONE_FROM]
        return min(due)[2] if due else None

    def num_deaths(self, request: Request) -> int:
        """Return how many deaths in a row a request is suspected of."""
        suspicion = self._suspected.get(request)
        return suspicion.num_deaths if suspicion else 0

    def note_loss(self, records: Iterable[PlanRecord], boot_id: str | None) -> None:
        """Take note of a worker's loss, before its rows are taken away.

        Args:
            records: plans that were outstanding.
            boot_id: of the worker; None if it counts as dead even if it comes back.
        """
        self._lost = _Death(boot_id, _under_way(records))

    def settle(self, boot_id: str, now: float) -> list[tuple[Request, int]]:
        """Take note of the next worker; return the requests that are given up, each with its number of deaths."""
        lost, self._lost = self._lost, None
        if lost is None or lost.boot_id == boot_id:
            return []
        if not lost.spans:
            self._unexplained_at = now
            return []
        for request, spans in lost.spans.items():
            self._suspect(request, spans)
        self._open = [*self._open[1 - MAX_OPEN_DEATHS :], set(lost.spans)]
        in_doubt = self._unexplained_at is not None and now - self._unexplained_at < DOUBT_S
        limit = MAX_DEATHS_IN_DOUBT if in_doubt else MAX_DEATHS
        given_up = [(r, s.num_deaths) for r, s in self._suspected.items() if s.num_deaths >= limit]
        if given_up:
            # It explains the deaths: the others only happened to be there.
            self.num_given_up += len(given_up)
            self._suspected.clear()
            self._open.clear()
        return given_up

    def note_result(self, record: PlanRecord, now: float) -> None:
        """Clear whoever a finished step has taken past what it is suspected for; before its tokens are confirmed."""
        reached = {c.sequence: c.sequence.num_confirmed for c in record.chunks if _is_of(c.sequence, c.residency)}
        drawing = zip(record.sequences, record.residencies, strict=True)
        reached |= {s: s.num_known for s, residency in drawing if _is_of(s, residency)}
        for request in {s.request: None for s in reached if s.request in self._suspected}:
            suspicion = self._suspected[request]
            if request.group is not None:
                farthest = max(reached.get(s, 0) for s in request.sequences)
                left = {s: span for s, span in suspicion.spans.items() if farthest < span[1]}
            else:
                left = {
                    s: span
                    for s, span in suspicion.spans.items()
                    if s.status is not Status.FINISHED and reached.get(s, 0) < span[1]
                }
            if left:
                suspicion.spans = left
            else:
                del self._suspected[request]
                self._absolve(request, now)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended: what it might have been the cause of stays unknown."""
        if self._lost is not None:
            self._lost.spans.pop(request, None)
        if self._suspected.pop(request, None) is not None:
            self._open = [death for death in self._open if request not in death]

    def _suspect(self, request: Request, spans: dict[Sequence, Span]) -> None:
        old = self._suspected.get(request)
        common: dict[Sequence, Span] = {}
        for s, (begin, end) in old.spans.items() if old else ():
            if s in spans and max(begin, spans[s][0]) < min(end, spans[s][1]):
                common[s] = (max(begin, spans[s][0]), min(end, spans[s][1]))
        # Without a token in common one request cannot have caused both: the newer death counts.
        self._suspected[request] = Suspicion(old.num_deaths + 1, common) if old and common else Suspicion(1, spans)

    def _absolve(self, request: Request, now: float) -> None:
        left: list[set[Request]] = []
        for death in self._open:
            death.discard(request)
            if death:
                left.append(death)
            else:
                self._unexplained_at = now
        self._open = left


def _is_of(sequence: Sequence, residency: int) -> bool:
    return sequence.residency == residency


def _under_way(records: Iterable[PlanRecord]) -> dict[Request, dict[Sequence, Span]]:
    """Return the tokens that outstanding plans were to compute of live requests."""
    found: dict[Request, dict[Sequence, Span]] = {}
    for record in records:
        for s in chain(record.sequences, (chunk.sequence for chunk in record.chunks)):
            request = s.request
            if s.status is Status.FINISHED or request.num_unfinished == 0:
                continue
            if request.group is not None:
                spans = [_span(beam) for beam in request.group.beams] or [(0, s.num_known)]
                found[request] = {request.sequences[0]: (min(b for b, _ in spans), max(e for _, e in spans))}
            else:
                found.setdefault(request, {})[s] = _span(s)
    return found


def _span(s: Sequence) -> Span:
    """Return what is under way of a sequence: all from the beginning, if its row has just begun or was taken away."""
    if s.status is not Status.RUNNING:
        return 0, max(1, s.num_furthest)
    return (s.num_confirmed if s.num_confirmed > s.num_cached else 0), s.num_planned


def given_up(num_deaths: int) -> str:
    """Return what the caller of a request is told that is given up."""
    return (
        f"{num_deaths} workers in a row were lost while they computed this request, the last time alone: "
        "it is not tried again"
    )
