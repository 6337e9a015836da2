"""What a process takes of its machine, read from /proc."""

import functools
import os

import msgspec

from octavo.wire.plan import NonNegative

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessSample(msgspec.Struct, frozen=True, array_like=True):
    """A process at one moment."""

    resident_bytes: NonNegative
    open_fds: NonNegative
    threads: NonNegative
    cpu_seconds: float  # user and system, since its start
    started_at: float  # seconds since the epoch
    max_fds: NonNegative = 0  # 0: no limit, or not known


def sample(pid: int | None = None) -> ProcessSample | None:
    """Return what a process of this machine and user takes, None if there is none or it cannot be read (no /proc).

    It costs about 50 us.

    Args:
        pid: which; None: this one.
    """
    folder = f"/proc/{'self' if pid is None else pid}"
    try:
        with open(f"{folder}/stat", encoding="ascii", errors="replace") as file:
            # The name, in parentheses, may hold anything.
            fields = file.read().rpartition(")")[2].split()
        num_fds = len(os.listdir(f"{folder}/fd"))
        # From field 3 on: 14 and 15 are user and system time, 20 threads, 22 the start, 24 the resident pages.
        return ProcessSample(
            resident_bytes=int(fields[21]) * _PAGE_BYTES,
            open_fds=num_fds,
            threads=int(fields[17]),
            cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
            started_at=_booted_at() + int(fields[19]) / _TICKS,
            max_fds=_max_fds(folder),
        )
    except (OSError, ValueError, IndexError):
        return None


def _max_fds(folder: str) -> int:
    with open(f"{folder}/limits", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Max open files"):
                soft = line.split()[3]
                return int(soft) if soft.isdecimal() else 0
    return 0


@functools.cache
def _booted_at() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        for line in file:
            if line.startswith("btime "):
                return float(line.split()[1])
    raise ValueError("/proc/stat has no btime")
