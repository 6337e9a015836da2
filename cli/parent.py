"""A child that ends with its parent, even after kill -9 of the parent."""

import ctypes
import os
import signal

from octavo.cli.errors import CommandError

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux: prctl(2), PR_SET_PDEATHSIG).

    Raises:
        CommandError: the parent has ended already, or the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise CommandError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it ended before the kernel knew
        raise CommandError(f"the parent process {parent_pid} has ended")
