"""CURVE for tcp between our processes: the keys of a folder, and the gate that lets known peers in.

libzmq encrypts and proves both sides; here it is only said which keys may come in. The folder holds `NAME.key` (public)
and `NAME.key_secret` (both halves) in libzmq's own form: `scheduler`, `frontend`, `worker`, and more peers if wanted. The
scheduler needs its own secret and lets in every other `NAME.key` of its folder; a peer needs its own secret and
`scheduler.key`.
"""

import asyncio
import logging
import re
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth import load_certificate
from zmq.auth.base import Authenticator
from zmq.utils.monitor import parse_monitor_message

from octavo.wire.errors import AddressInUse, CurveKeysError

SCHEDULER = "scheduler"
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"

MAX_PEER_KEYS = 1024
MAX_KEY_FILE_BYTES = 4096

LOG_INTERVAL_S = 60.0
"""Handshakes that fail are counted, and told at most so often: anybody who reaches the port can make them."""

ZAP_DOMAIN = b"octavo"

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes
_STOP = b"stop"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerKeys:
    """What the scheduler needs: its own pair, and the public keys of those that it lets in (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes]


@dataclass(frozen=True)
class PeerKeys:
    """What a frontend or worker needs: its own pair, and the scheduler's public key (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes


def load_scheduler_keys(folder: Path | None) -> SchedulerKeys | None:
    """Return the scheduler's keys, None without a folder.

    Raises:
        CurveKeysError: a file is missing, is no certificate, or is a secret that others can use; or there is no peer.
    """
    if folder is None:
        return None
    public, secret = _load_pair(folder, SCHEDULER)
    files = sorted(path for path in folder.glob(f"*{PUBLIC_SUFFIX}") if path.stem != SCHEDULER)
    if not 0 < len(files) <= MAX_PEER_KEYS:
        raise CurveKeysError(f"{folder} has {len(files)} public keys of peers: from 1 to {MAX_PEER_KEYS} are needed")
    return SchedulerKeys(public, secret, frozenset(_load(path)[0] for path in files))


def load_peer_keys(folder: Path | None, name: str) -> PeerKeys | None:
    """Return the keys of a frontend or worker, None without a folder.

    Args:
        folder: of the keys.
        name: `frontend` or `worker`.

    Raises:
        CurveKeysError: a file is missing, is no certificate, or is a secret that others can use.
    """
    if folder is None:
        return None
    public, secret = _load_pair(folder, name)
    return PeerKeys(public, secret, _load(folder / f"{SCHEDULER}{PUBLIC_SUFFIX}")[0])


class Gate(threading.Thread):
    """Answers libzmq's question who may come in (ZAP), and counts handshakes that fail, in a thread of its own.

    A thread, because libzmq's own waits until somebody reads what it tells of failed handshakes, and a busy scheduler
    must not let it. Without this thread nobody comes in.

    Args:
        context: of the socket; it can have one gate.
        socket: the ROUTER, before it is bound.
        keys: whom to let in.

    Attributes:
        num_refused: handshakes that failed: no key, an unknown one, or bytes that are no handshake.

    Raises (on construction):
        AddressInUse: the context has a gate already.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: SchedulerKeys
    ) -> None:
        super().__init__(name="curve", daemon=True)
        self.num_refused = 0
        self._allowed = keys.allowed
        self._next_log = time.monotonic()
        self._authenticator = Authenticator(context)
        try:
            self._authenticator.start()
        except zmq.ZMQError as error:
            self._authenticator.stop()
            raise AddressInUse(f"another socket of this process lets peers in: {error}") from error
        self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), credentials_provider=self)
        self._router = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(HANDSHAKE_FAILED)
        self._stop_sender, self._stop_receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop_sender.bind(f"inproc://octavo.gate.{id(self)}")
        self._stop_receiver.connect(f"inproc://octavo.gate.{id(self)}")
        self.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether a peer with this public key (Z85) may come in; pyzmq's authenticator asks."""
        return key in self._allowed

    def run(self) -> None:
        """Answer and count until `stop`."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """End the thread and close its sockets."""
        self._stop_sender.send(_STOP)
        self.join()
        self._router.disable_monitor()
        for socket in (self._monitor, self._stop_sender, self._stop_receiver):
            socket.close(linger=0)
        self._authenticator.stop()

    async def _serve(self) -> None:
        questions = self._authenticator.zap_socket
        poller = zmq.asyncio.Poller()
        for socket in (questions, self._monitor, self._stop_receiver):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if self._stop_receiver in ready:
                return
            if questions in ready:
                await self._authenticator.handle_zap_message(questions.recv_multipart())
            while self._monitor.poll(0):
                parse_monitor_message(self._monitor.recv_multipart())
                self._count()

    def _count(self) -> None:
        self.num_refused += 1
        if (now := time.monotonic()) >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            _log.warning("connections refused so far that hold no key of a known peer: %d", self.num_refused)


def guard(context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: SchedulerKeys) -> Gate:
    """Let only known peers into a ROUTER that is not bound yet.

    Raises:
        AddressInUse: the context has a gate already.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody comes in, instead of everybody
    return Gate(context, socket, keys)


def present(socket: "zmq.Socket[bytes]", keys: PeerKeys) -> None:
    """Let a DEALER that is not connected yet show its key, and see that the scheduler's is the right one."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.scheduler)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _load_pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}{SECRET_SUFFIX}"
    public, secret = _load(path)
    if secret is None:
        raise CurveKeysError(f"{path} holds no secret key")
    if (mode := stat.S_IMODE(path.stat().st_mode)) & stat.S_IRWXO:
        raise CurveKeysError(f"{path} has mode {mode:04o}: others may use it; 'chmod o-rwx' it")
    if zmq.curve_public(secret) != public:
        raise CurveKeysError(f"{path}: its two keys are no pair")
    return public, secret


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        if not path.is_file():
            raise CurveKeysError(f"{path} is missing: 'octavo keys FOLDER' makes keys")
        if (size := path.stat().st_size) > MAX_KEY_FILE_BYTES:
            raise CurveKeysError(f"{path} has {size} bytes, limit {MAX_KEY_FILE_BYTES}")
        public, secret = load_certificate(path)
    except OSError as error:
        raise CurveKeysError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise CurveKeysError(f"{path} holds no public key") from None
    if not all(key is None or _KEY.fullmatch(key) for key in (public, secret)):
        raise CurveKeysError(f"{path} holds a key that is not 40 characters of Z85")
    return public, secret
