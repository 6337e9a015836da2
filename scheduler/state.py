"""The table of live requests, and how many of them count against the bounds of the waiting queue."""

from collections import Counter
from collections.abc import Iterator

from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.sequence import Request
from octavo.wire.ids import Handle, SessionId


class RequestTable:
    """Requests by frontend and handle, from admission to their end.

    The law: `num_unstarted` and `num_unstarted_tokens` count the requests that no plan has named yet; replays, which an
    earlier scheduler or session had admitted already, are counted in `num_unstarted_replays` instead. A grammar is held
    once, as long as a request has it.
    """

    def __init__(self) -> None:
        self.num_unstarted = 0
        self.num_unstarted_tokens = 0
        self.num_unstarted_replays = 0
        self._by_frontend: dict[SessionId, dict[Handle, Request]] = {}
        self._num_of_caller: Counter[str] = Counter()
        self._waiting_tokens_of_caller: Counter[str] = Counter()
        self._grammars: dict[bytes, tuple[bytes, int]] = {}
        self.num_grammar_bytes = 0

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._by_frontend.values())

    def __iter__(self) -> Iterator[Request]:
        for requests in self._by_frontend.values():
            yield from requests.values()

    def find(self, frontend: SessionId, handle: int) -> Request | None:
        """Return a live request."""
        return self._by_frontend.get(frontend, {}).get(Handle(handle))

    def of_frontend(self, frontend: SessionId) -> list[Request]:
        """Return a frontend's live requests."""
        return list(self._by_frontend.get(frontend, {}).values())

    def num_of_frontend(self, frontend: SessionId) -> int:
        """Return how many live requests a frontend has."""
        return len(self._by_frontend.get(frontend, ()))

    def num_of_caller(self, caller: str) -> int:
        """Return how many live requests a caller has."""
        return self._num_of_caller[caller]

    def waiting_tokens_of_caller(self, caller: str) -> int:
        """Return the tokens, as the bounds count them, of a caller's requests that no plan has named."""
        return self._waiting_tokens_of_caller[caller]

    def has_grammar(self, grammar: bytes) -> bool:
        """Say whether a live request has it."""
        return grammar in self._grammars

    def add(self, request: Request) -> None:
        """Admit a request."""
        if request.grammar:
            request.grammar, count = self._grammars.get(request.grammar, (request.grammar, 0))
            self._grammars[request.grammar] = request.grammar, count + 1
            self.num_grammar_bytes += 0 if count else len(request.grammar)
        self._by_frontend.setdefault(request.frontend, {})[request.handle] = request
        self._num_of_caller[request.caller] += 1
        self._count(request, 1)

    def mark_started(self, request: Request) -> None:
        """Take note that a plan names the request for the first time."""
        self._count(request, -1)
        request.is_started = True

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        requests = self._by_frontend[request.frontend]
        del requests[request.handle]
        if request.grammar:
            self._release_grammar(request.grammar)
        if not requests:
            del self._by_frontend[request.frontend]
        _change(self._num_of_caller, request.caller, -1)
        self._count(request, -1)

    def check(self) -> None:
        """Prove the counts.

        Raises:
            InvariantViolation: one is wrong.
        """
        unstarted = [r for r in self if not r.is_started]
        new = [r for r in unstarted if not r.is_replay]
        found = (len(new), sum(r.num_queued_tokens for r in new), len(unstarted) - len(new))
        counted = (self.num_unstarted, self.num_unstarted_tokens, self.num_unstarted_replays)
        if found != counted:
            raise InvariantViolation(f"unstarted requests, tokens, replays are {found}, counted {counted}")
        tokens: Counter[str] = Counter()
        for request in new:
            tokens[request.caller] += request.num_queued_tokens
        if self._num_of_caller != Counter(r.caller for r in self) or self._waiting_tokens_of_caller != tokens:
            raise InvariantViolation(f"callers have {self._num_of_caller} requests, {tokens} tokens that wait")
        grammars = Counter(r.grammar for r in self if r.grammar)
        held = {grammar: count for grammar, (_, count) in self._grammars.items()}
        if held != grammars or self.num_grammar_bytes != sum(map(len, grammars)):
            raise InvariantViolation(f"{len(grammars)} grammars are in use, {len(held)} are held")

    def _release_grammar(self, grammar: bytes) -> None:
        held, count = self._grammars[grammar]
        if count > 1:
            self._grammars[grammar] = held, count - 1
        else:
            del self._grammars[grammar]
            self.num_grammar_bytes -= len(grammar)

    def _count(self, request: Request, sign: int) -> None:
        if request.is_started:
            return
        if request.is_replay:
            self.num_unstarted_replays += sign
        else:
            self.num_unstarted += sign
            self.num_unstarted_tokens += sign * request.num_queued_tokens
            _change(self._waiting_tokens_of_caller, request.caller, sign * request.num_queued_tokens)


def _change(counter: Counter[str], caller: str, amount: int) -> None:
    """Change a count, and forget the caller with the last of it."""
    counter[caller] += amount
    if not counter[caller]:
        del counter[caller]
