"""The deadlines of live requests, earliest first."""

from heapq import heapify, heappop, heappush

from octavo.scheduler.sequence import Request

_SLACK = 64


class Deadlines:
    """A heap with lazy removal. Entries of ended requests never outnumber the live ones by more than a constant."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._heap[0][1] not in self._live:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline != float("inf"):
            heappush(self._heap, (request.deadline, request.arrival, request))
            self._live.add(request.arrival)

    def remove(self, request: Request) -> None:
        """Watch a request no longer."""
        self._live.discard(request.arrival)
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapify(self._heap)

    def expired(self, now: float) -> list[Request]:
        """Take the requests whose deadline has come."""
        found: list[Request] = []
        while (due := self.next) is not None and due <= now:
            request = heappop(self._heap)[2]
            self._live.discard(request.arrival)
            found.append(request)
        return found
