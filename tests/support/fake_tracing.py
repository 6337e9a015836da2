"""Stands for OpenTelemetry where a test asks what is told; and a driver of the core that is watched."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from octavo.scheduler.events import Event, RequestSubmitted
from octavo.scheduler.instructions import Instruction
from octavo.scheduler.tracing import RequestTraces
from octavo.wire.tracing_export import Tracing
from tests.support.core_driver import Client, CoreDriver


class Recorded(NamedTuple):
    """A span that was told whole."""

    name: str
    trace: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[str]


class FakeTracing:
    """Keeps spans; a place in a trace is its traceparent."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    @property
    def real(self) -> Tracing:
        return cast(Tracing, self)

    def remote(self, traceparent: str) -> str:
        return traceparent

    def record(
        self,
        name: str,
        parent: str,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        events: Sequence[tuple[str, int, object]] = (),
    ) -> None:
        assert begin_ns <= end_ns
        self.spans.append(Recorded(name, parent, begin_ns, end_ns, attributes, [event for event, _, _ in events]))

    def of(self, trace: str) -> dict[str, Recorded]:
        """Return what was told of a trace, by name."""
        found = [span for span in self.spans if span.trace == trace]
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}


class TracedDriver(CoreDriver):
    """A core that is watched; after every turn exactly its live requests with a trace are held."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.tracing = FakeTracing()
        self.traces = RequestTraces(self.tracing.real)

    @staticmethod
    def trace_of(client: Client) -> str:
        return f"{client.frontend}-{client.handle}" if client.handle % 3 else ""

    def tell(self, *events: Event) -> list[Instruction]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, RequestSubmitted):
                trace = self.trace_of(self.clients[event.frontend, event.message.handle])
                event = RequestSubmitted(event.frontend, replace(event.message, trace=trace))
            told.append(event)
        instructions = super().tell(*told)
        self.traces.observe(told, instructions, self.now)
        live = {(request.frontend, request.handle) for request in self.core._requests if request.trace}
        assert set(self.traces._live) == live
        assert set(self.traces._by_trace.values()) == live
        assert {key for key, _ in self.traces._rows.values()} <= live
        assert self.traces._untold <= live
        return instructions
