"""A simulated scheduler: the real Service over links, its core checked after every turn."""

from collections import Counter
from collections.abc import Callable

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event
from octavo.scheduler.instructions import Instruction
from octavo.scheduler.service import Service
from octavo.scheduler.sessions import Channel
from octavo.scheduler.simulate.checks import Auditor
from octavo.scheduler.simulate.links import Network, RouterLink
from octavo.scheduler.simulate.world import Process, Violation, World
from octavo.wire.ids import BootId, SessionId


class WatchedService(Service):
    """The service, with an auditor that sees what the core is told and what it wants."""

    def __init__(
        self,
        channel: Channel,
        config: SchedulerConfig,
        boot_id: BootId,
        new_session: Callable[[], SessionId],
        stats: Counter[str],
    ) -> None:
        super().__init__(channel, config, boot_id, 3, new_session=new_session)
        self.auditor = Auditor(config, stats)

    def decide(self, events: list[Event], now: float) -> list[Instruction]:
        """Let the core decide, and check it."""
        instructions = super().decide(events, now)
        self.auditor.follow(events, instructions, now)
        return instructions


class SimScheduler(Process):
    """One life of the scheduler."""

    def __init__(self, world: World, network: Network, boot_id: BootId, config: SchedulerConfig) -> None:
        super().__init__(world)
        self.link = RouterLink(network, self.wake)
        self.service = WatchedService(self.link, config, boot_id, self._new_session, world.stats)

    def turn(self) -> None:
        """Let the service take its turn, and prove its state."""
        now = self.world.now
        service = self.service
        service.turn(now)
        service.core.check()
        for session in service.auditor.frontends:
            if service.sessions.peers.by_session(session) is None:
                raise Violation(f"requests of session {session:x}, which is over, live on")
        if service.num_failed_checks:
            raise Violation("the idle check failed")
        if len(self.link):
            self.wake()
        if (timer := service.next_timer) is not None:
            if timer <= now:
                raise Violation(f"a timer that was due at {timer} is due still")
            self.wake_at(timer)

    def vanish(self) -> None:
        """Die."""
        self._account()
        super().vanish()
        self.link.close()

    def leave(self) -> None:
        """Say Goodbye to all and end."""
        self._account()
        super().vanish()
        self.service.leave("the scheduler was told to stop")
        self.link.close(keeps_sent=True)

    def _account(self) -> None:
        """Add up what this life has seen."""
        figures, stats = self.service.core.figures, self.world.stats
        stats["preemptions"] += figures.num_preemptions
        stats["recomputed tokens"] += figures.num_recomputed_tokens
        stats["rows adopted"] += figures.num_adopted_rows
        stats["tokens adopted"] += figures.num_adopted_tokens
        stats["old results"] += figures.num_old_results
        stats["malformed"] += self.link.num_malformed
        stats["strays"] += self.service.sessions.num_strays
        stats["hellos said twice"] += self.service.sessions.num_duplicate_hellos

    def _new_session(self) -> SessionId:
        return SessionId(self.world.random.getrandbits(63) | 1)
