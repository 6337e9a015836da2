"""Bugs to plant: each breaks the scheduler for the time of a run, so that a test can tell that the simulation finds it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from octavo.scheduler.adoption import Adoption, Start
from octavo.scheduler.batch import Batch
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.cache import PrefixCache
from octavo.scheduler.sequence import Sequence, Status
from octavo.scheduler.suspects import Suspects
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import BlockId


@contextmanager
def _replaced(owner: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method by what `make` makes of it."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _every(period: int) -> Callable[[], bool]:
    """Return what is true at each `period`-th call."""
    count = 0

    def is_time() -> bool:
        nonlocal count
        count += 1
        return count % period == 0

    return is_time


def _refcount() -> AbstractContextManager[None]:
    """Now and then, sharing a block that is in use does not count."""
    is_time = _every(10)

    def make(real: Callable[[BlockPool, BlockId], None]) -> Callable[[BlockPool, BlockId], None]:
        def share(pool: BlockPool, block: BlockId) -> None:
            if pool.count(block) == 0 or not is_time():
                real(pool, block)

        return share

    return _replaced(BlockPool, "share", make)


def _withdrawal() -> AbstractContextManager[None]:
    """A faulting row's blocks can still be found, and whoever holds them goes on with them."""

    def make(_: object) -> Callable[[PrefixCache, object, object], set[BlockId]]:
        return lambda cache, faulty, suspects: set()

    return _replaced(PrefixCache, "withdraw", make)


def _row() -> AbstractContextManager[None]:
    """Now and then, the worker is not told that a row is free, and the row is given out again."""
    is_time = _every(50)

    def make(real: Callable[[Batch, Sequence, Status, int], None]) -> Callable[[Batch, Sequence, Status, int], None]:
        def leave(batch: Batch, sequence: Sequence, status: Status, newest_step: int) -> None:
            real(batch, sequence, status, newest_step)
            if is_time():
                batch._to_free.pop()

        return leave

    return _replaced(Batch, "leave", make)


def _copy() -> AbstractContextManager[None]:
    """A shared block is written without having been copied."""

    def make(_: object) -> Callable[[BlockTables, int, int], bool]:
        return lambda tables, number, begin: False

    return _replaced(BlockTables, "must_copy", make)


def _beam() -> AbstractContextManager[None]:
    """Beams write to the block that they share with others."""

    def make(real: Callable[[BlockTables, int, int], bool]) -> Callable[[BlockTables, int, int], bool]:
        def must_copy(tables: BlockTables, number: int, begin: int) -> bool:
            return number not in tables._accounts and real(tables, number, begin)

        return must_copy

    return _replaced(BlockTables, "must_copy", make)


def _reset() -> AbstractContextManager[None]:
    """A reset of the prefix cache leaves everything to be found."""

    def make(_: object) -> Callable[[PrefixCache, Iterable[Sequence]], int]:
        return lambda cache, running: len(cache)

    return _replaced(PrefixCache, "clear", make)


def _together() -> AbstractContextManager[None]:
    """Whoever is suspected goes on running with all others."""

    def make(_: object) -> Callable[[Suspects], None]:
        return cast("Callable[[Suspects], None]", property(lambda suspects: None))

    return _replaced(Suspects, "alone", make)


def _grudge() -> AbstractContextManager[None]:
    """Nobody is ever cleared of a death."""

    def make(_: object) -> Callable[[Suspects, object, float], None]:
        return lambda suspects, record, now: None

    return _replaced(Suspects, "note_result", make)


def _mercy() -> AbstractContextManager[None]:
    """Nobody is given up, however many workers it has killed."""

    def make(real: Callable[[Suspects, str, float], object]) -> Callable[[Suspects, str, float], list[object]]:
        def settle(suspects: Suspects, boot_id: str, now: float) -> list[object]:
            real(suspects, boot_id, now)
            return []

        return settle

    return _replaced(Suspects, "settle", make)


def _token() -> AbstractContextManager[None]:
    """Who goes on from a worker's row counts one token more as computed than is."""

    def make(real: Callable[[Adoption, Sequence], Start | None]) -> Callable[[Adoption, Sequence], Start | None]:
        def find(adoption: Adoption, sequence: Sequence) -> Start | None:
            if (start := real(adoption, sequence)) is None or start.num_tokens % adoption._block_size == 0:
                return start
            return start._replace(num_tokens=start.num_tokens + 1)

        return find

    return _replaced(Adoption, "find", make)


def _cut() -> AbstractContextManager[None]:
    """Blocks of a worker's rows are gone on from though they were given out since."""

    def make(_: object) -> Callable[[Adoption, BlockId], None]:
        return lambda adoption, block: None

    return _replaced(Adoption, "cut", make)


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "refcount": _refcount,
    "withdrawal": _withdrawal,
    "row": _row,
    "copy": _copy,
    "beam": _beam,
    "reset": _reset,
    "together": _together,
    "grudge": _grudge,
    "mercy": _mercy,
    "token": _token,
    "cut": _cut,
}
"""By the name that --plant takes."""
