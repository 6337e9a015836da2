"""What a step's faults mean for the requests whose rows faulted."""

from dataclasses import dataclass, field

from octavo.scheduler.pipeline import Matched
from octavo.scheduler.sequence import Request, Sequence
from octavo.wire.plan import FAULT_GRAMMAR, FAULT_NO_CANDIDATE, FAULT_NONFINITE_LOGITS
from octavo.wire.requests import FailureCode

_FAILURES = {
    FAULT_NONFINITE_LOGITS: (FailureCode.INTERNAL, "non-finite logits"),
    # What the request itself asks for contradicts itself: to try again would not help.
    FAULT_NO_CANDIDATE: (FailureCode.INVALID, "masks and filters left no id that could be drawn"),
    FAULT_GRAMMAR: (FailureCode.INTERNAL, "no token goes on with the output in the form that was asked for"),
}


@dataclass(slots=True)
class Faults:
    """Who is to be withdrawn from, who fails, and who is given another chance."""

    broken: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences whose values broke, and their stays in the batch."""
    suspects: list[Sequence] = field(default_factory=list)
    """Of these, those that may have found broken blocks."""
    failing: list[tuple[Request, FailureCode, str]] = field(default_factory=list)
    again: list[Sequence] = field(default_factory=list)
    """What they found may be what is broken: they compute everything themselves."""


def sort_faults(matched: Matched) -> Faults:
    """Return what a step's faults mean; what broke is published no more from here on."""
    record, found = matched.record, Faults()
    faulty = [(record.sequences[i], record.residencies[i], fault) for i, fault in matched.faults.items()]
    faulty += [(s, residency, FAULT_NONFINITE_LOGITS) for s, residency in matched.broken]
    for s, residency, fault in faulty:
        if is_broken := fault == FAULT_NONFINITE_LOGITS:
            found.broken.append((s, residency))
            if s.uses_cache and record.step > s.void_through:
                found.suspects.append(s)
            if abs(s.residency) == residency:
                for sibling in s.request.sequences:
                    sibling.publishes = False
        if not record.counts(s, residency):
            continue
        if is_broken and s.uses_cache and (s.num_cached > 0 or s.residency != residency):
            found.again.append(s)
        else:
            found.failing.append((s.request, *_FAILURES.get(fault, (FailureCode.INTERNAL, f"fault {fault}"))))
    return found
