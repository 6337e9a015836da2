"""What the worker's loop asks of whoever executes plans; it needs no tensors."""

from typing import Protocol

from octavo.wire.held_rows import HeldRow
from octavo.wire.plan import StepPlan, StepResult
from octavo.worker.mirror import RowLimits

LOOK_INTERVAL_S = 20e-6
"""Between two looks at a GPU while it computes. The system makes about 70 us of it, which is little beside a step."""


class RowsView(Protocol):
    """What others may know and ask of a runner's rows."""

    @property
    def limits(self) -> RowLimits:
        """What they can hold."""
        ...

    def clear(self) -> None:
        """Forget every row: the session is over."""
        ...

    def __len__(self) -> int: ...


class Runner(Protocol):
    """Executes plans in order on one device. Owns the rows; weights and caches outlive its sessions."""

    @property
    def rows(self) -> RowsView:
        """The persistent batch."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Plans that were launched and whose results were not taken."""
        ...

    def profile(self) -> None:
        """Run the largest step once, without touching any row or block: what it takes at its peak is then known."""
        ...

    def profile_sampling(self) -> None:
        """Draw an id for as many rows as there can be, each of which wants everything and is as long as it may be."""
        ...

    def rehearse(self, *, prompts: bool) -> None:
        """Have compiled what `capture` needs: of steps with prompts, or of decodes alone. No row or block is touched."""
        ...

    def capture(self) -> None:
        """Capture what can be captured; plans can be executed before as well, slower."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Apply a plan and start what it asks for; does not wait for the device.

        Raises:
            PlanError: it contradicts the rows; they must not be used any more.
        """
        ...

    def take_results(self) -> list[StepResult]:
        """Return the results that are there, in the order of the plans; does not wait for the device."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a plan while none is in flight, and wait for its result.

        Raises:
            PlanError: see `launch`.
        """
        ...

    def hold(self) -> list[HeldRow]:
        """Forget rows, and plans in flight once the device is done with them: the session is over.

        Returns:
            The rows that the next session may go on from: the cache stays as it is until a plan writes to it.
        """
        ...

    def clear(self) -> None:
        """Forget rows, plans in flight, and what the cache holds; returns when the device is done with them."""
        ...
