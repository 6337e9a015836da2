"""The sockets that a frontend listens on for HTTP."""

import socket

from octavo.wire import live

BACKLOG = 256
"""Connections that wait to be accepted. Where file descriptors run out asyncio logs so many failures at a time."""


class CannotListen(Exception):
    """The address to listen on is taken or not ours."""


def listen_tcp(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Return a socket that listens on a host and port; port 0 lets the system choose one.

    Args:
        host: a name or address, IPv6 with or without brackets.
        port: the port.
        reuse_port: share it with other processes of this user that say so too.

    Raises:
        CannotListen: the port is taken, or the host is not ours.
    """
    address = f"{host}:{port}"
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {address} (HTTP): {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {address} (HTTP): is the port taken, or the host another's?"
        raise CannotListen(message) from error
    return listener


def listen_unix(path: str) -> socket.socket:
    """Return a Unix socket that listens at a path; what an earlier life of this process left there is replaced.

    Raises:
        CannotListen: the path holds something else, is too long, or its folder is missing.
    """
    try:
        return live.listen_unix(path, BACKLOG)
    except OSError as error:
        raise CannotListen(f"cannot listen at {path}: {error.strerror or error}") from error
