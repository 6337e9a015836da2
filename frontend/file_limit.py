"""How the files that a frontend may have open are shared out: each connection is one, and some must be left for the rest.

Half of them are HTTP's, a quarter gRPC's, an eighth may be taken by HTTP connections that have just come and are about to be
refused; the last eighth is for the scheduler, the compiler of grammars and the process itself.
"""

import logging
import resource

FEW_FILES = 4096
"""With fewer it is worth a line in the log what they allow."""

_log = logging.getLogger(__name__)


def raise_file_limit() -> None:
    """Allow as many open files as the system does: the usual soft limit is a thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        _log.debug("the limit of open files stays: %s", error)
    files = _files()
    if files < FEW_FILES:
        _log.warning(
            "only %d files may be open here: at most %d connections of gRPC and %d of HTTP; raise it with ulimit -n",
            files,
            max_grpc_connections(),
            max_http_connections(),
        )


def max_grpc_connections() -> int:
    """Return how many connections gRPC may have; what connects beyond it is closed."""
    return max(1, _files() // 4)


def max_http_connections() -> int:
    """Return how many connections HTTP may have."""
    return max(1, _files() // 2)


def max_new_http_connections(wanted: int) -> int:
    """Return how many HTTP connections may be taken at once, before the first of them is looked at."""
    return max(1, min(wanted, _files() // 8))


def _files() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if files == resource.RLIM_INFINITY else min(files, 2**31 - 1)
