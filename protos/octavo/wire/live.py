"""Whether a process's loop makes progress: what the loop notes, and a thread that tells whoever asks.

The loop counts its moves (`Progress`). A thread (`LiveAnswers`) looks at the count: it answers at a Unix socket, so that
a supervisor or a container's health check learns of a process that is stopped (no answer) or whose loop hangs (an answer
that says so), and it ends the process when the loop has stood still for too long, so that whoever supervises, if anybody
does, starts another one. Answers are HTTP: GET /health (200: alive, 503: stalled) and GET /ready.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self

EXIT_STALLED = 3
"""Exit code of a process that ended itself because its loop stood still."""

LOADING, SERVING, STALLED = "loading", "serving", "stalled"

LOADING_LIMIT_S = 3600.0
"""How long loading may stand still: one tensor from a slow disk, or the compilation of all kernels."""

LOOK_INTERVAL_S = 1.0
ASKER_PATIENCE_S = 1.0
"""How long an asker may take for its request, and for taking the answer."""
BACKLOG = 16
_MAX_REQUEST_BYTES = 4096
_TELL_TIMEOUT_S = 2.0
_AFTER_FAILURE_S = 0.1
_SHOWN_FRAMES = 3

_log = logging.getLogger(__name__)


class Progress:
    """What a loop notes of itself; it alone writes here, and a thread reads.

    Args:
        limit_s: how long the loop may stand still while it serves.
        state: LOADING or SERVING.

    Attributes:
        num_moves: grows whenever the loop has come further.
        is_resting: the loop waits for something to do, and may do so for ever.
        is_ready: work can be given to this process.
    """

    def __init__(self, limit_s: float = LOADING_LIMIT_S, state: str = LOADING) -> None:
        self.num_moves = 0
        self.is_resting = False
        self.is_ready = False
        self.state = state
        self._limit_s = limit_s

    @property
    def limit_s(self) -> float:
        """How long the loop may stand still now."""
        return LOADING_LIMIT_S if self.state == LOADING else self._limit_s

    def move(self) -> None:
        """Note that the loop has come further."""
        self.is_resting = False
        self.num_moves += 1

    def rest(self) -> None:
        """Note that the loop waits until there is something to do."""
        self.is_resting = True

    def serve(self, limit_s: float | None = None) -> None:
        """Note that what had to be loaded is there; and, if it is known only now, how long the loop may stand still."""
        self.state = SERVING
        self._limit_s = self._limit_s if limit_s is None else limit_s
        self.move()


class Standstill:
    """Adds up how long a loop has stood still. A pause of the whole process, or of the machine, hardly counts.

    Args:
        progress: of the loop.
        now: monotonic seconds.
    """

    def __init__(self, progress: Progress, now: float) -> None:
        self.seconds = 0.0
        self._progress = progress
        self._num_moves = progress.num_moves
        self._looked_at = now

    def look(self, now: float) -> None:
        """Look at the loop; to be called every LOOK_INTERVAL_S or so."""
        elapsed_s, self._looked_at = now - self._looked_at, now
        num_moves = self._progress.num_moves
        if self._progress.is_resting or num_moves != self._num_moves:
            self.seconds = 0.0
        else:
            # Who looks late was kept from it by what may have kept the loop from its work.
            self.seconds += min(elapsed_s, 2 * LOOK_INTERVAL_S)
        self._num_moves = num_moves

    @property
    def is_too_long(self) -> bool:
        """Whether the loop counts as hung."""
        return self.seconds > self._progress.limit_s


class LiveAnswers:
    """The thread that watches a loop, while entered.

    Args:
        role: of the process, for messages.
        progress: what the loop notes.
        path: of the Unix socket where to answer; '' to answer nobody.
        end: called once when the loop has stood still for too long, with what is wrong.

    Raises (on construction):
        OSError: the path holds something else than a socket of this user that nobody listens on, or cannot be used.
    """

    def __init__(self, role: str, progress: Progress, path: str = "", end: Callable[[str], None] | None = None) -> None:
        self._role = role
        self._progress = progress
        self._path = path
        self._end = end or _end_process
        self._has_ended = False
        self._standstill = Standstill(progress, time.monotonic())
        self._listener = listen_unix(path) if path else None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="live answers", daemon=True)
        self._watched = threading.get_ident()

    def __enter__(self) -> Self:
        """Begin to watch the loop, which this thread runs."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Answer no more, and remove the socket."""
        self._wake_sender.send(b"\0")
        self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()
        if self._listener is not None:
            self._listener.close()
            remove_socket(self._path)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the loop
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(LOOK_INTERVAL_S)]
                if self._wake_receiver in ready:
                    return
                self._look()
                if ready and self._listener is not None:
                    try:
                        self._answer(self._listener)
                    except OSError as error:  # the asker has gone, or no file is left for it, who then waits on
                        _log.debug("somebody who asked was not answered: %s", error)
                        time.sleep(_AFTER_FAILURE_S)

    def _look(self) -> None:
        self._standstill.look(time.monotonic())
        if self._standstill.is_too_long and not self._has_ended:
            self._has_ended = True
            self._end(f"the {self._role} {self._wrong()}; its loop is at {where(self._watched)}")

    def _wrong(self) -> str:
        work = "loading" if self._progress.state == LOADING else "its work"
        return f"has made no progress with {work} for {self._standstill.seconds:.0f} s"

    def _answer(self, listener: socket.socket) -> None:
        asker, _ = listener.accept()
        with asker:
            asker.settimeout(ASKER_PATIENCE_S)
            request = asker.recv(_MAX_REQUEST_BYTES)
            asker.sendall(self._response(request.split(b" ")[1] if request.count(b" ") > 1 else b""))

    def _response(self, path: bytes) -> bytes:
        is_stalled = self._standstill.is_too_long
        is_ready = self._progress.is_ready and not is_stalled
        body = {
            "state": STALLED if is_stalled else self._progress.state,
            "ready": is_ready,
            "standstill_s": round(self._standstill.seconds, 1),
        }
        if is_stalled:
            body["reason"] = f"it {self._wrong()}"
        status = {b"/health": "503 Service Unavailable" if is_stalled else "200 OK"}.get(path, "404 Not Found")
        if path == b"/ready":
            status = "200 OK" if is_ready else "503 Service Unavailable"
        data = json.dumps(body)
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        return f"{head}connection: close\r\n\r\n{data}".encode()


def where(thread: int) -> str:
    """Return the innermost places at which a thread is, the innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)[-_SHOWN_FRAMES:]
    return ", ".join(f"{os.path.basename(one.filename)}:{one.lineno} {one.name}" for one in stack)


def listen_unix(path: str, backlog: int = BACKLOG) -> socket.socket:
    """Return a Unix socket that listens at a path, for this user alone; what an earlier life left there is replaced.

    Raises:
        OSError: the path holds something else, or what another user left, is too long, or its folder is missing.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_socket(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def remove_socket(path: str) -> None:
    """Remove the file of a Unix socket of this user; what is none, or another's, stays."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
            os.unlink(path)


def _end_process(reason: str) -> None:
    """Say why, unless the log itself hangs, and end at once: an orderly end would need the loop."""
    teller = threading.Thread(
        target=_log.critical, args=("%s; this process ends, so that another one can try", reason), daemon=True
    )
    teller.start()
    teller.join(_TELL_TIMEOUT_S)
    os._exit(EXIT_STALLED)
