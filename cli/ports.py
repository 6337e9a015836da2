"""Ports that a service is going to listen on: taken for it alone before anything starts."""

import socket

from octavo.cli.errors import ConfigurationError


def check_port(host: str, port: int) -> None:
    """Check that nobody listens on a port.

    Raises:
        ConfigurationError: somebody does, or the host is not ours.
    """
    _bound(host, port).close()


def hold_port(host: str, port: int) -> socket.socket:
    """Return a socket that keeps a port for processes of ours that share it (SO_REUSEPORT); it does not listen itself.

    Until it is closed nobody else can listen there: bound as the only one first, it lets in only who shares the port and
    is of this user, and another service that asks first, as this one does, finds the port taken.

    Raises:
        ConfigurationError: somebody listens there, or the host is not ours.
    """
    holder = _bound(host, port)
    # With SO_REUSEADDR left on, a second one could be bound beside it as long as neither listens.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return holder


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound
