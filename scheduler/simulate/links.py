"""The network between the processes: what the channels of octavo.wire promise, and what can go wrong with them.

Frames are bytes, through the real codec. Queues are bounded; a full one is SessionLost at the sender. In good weather a
connection keeps the order and loses nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.scheduler.simulate.world import World
from octavo.wire.codec import (
    Envelope,
    FromPeer,
    FromScheduler,
    decode_from_peer,
    decode_from_scheduler,
    encode,
)
from octavo.wire.errors import MalformedMessage, ProtocolMismatch, SessionLost
from octavo.wire.handshake import PROTOCOL_VERSION, Refuse
from octavo.wire.ids import BootId

STRANGER = b"stranger"
"""Identity under which garbage arrives that is no peer's."""


@dataclass
class Weather:
    """What befalls frames: probabilities of one frame, and the latency of a good one.

    Attributes:
        min_latency_s, max_latency_s: of a frame in good weather.
        lose, duplicate, reorder, corrupt, delay: bad ends.
    """

    min_latency_s: float = 0.0001
    max_latency_s: float = 0.001
    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0

    @property
    def badness(self) -> float:
        """Probability that anything befalls a frame."""
        return self.lose + self.duplicate + self.reorder + self.corrupt + self.delay

    def clear(self) -> None:
        """Let nothing befall frames any more."""
        self.lose = self.duplicate = self.reorder = self.corrupt = self.delay = 0.0


class Direction:
    """One way of a connection."""

    __slots__ = ("clogged_until", "is_cut", "last_arrival", "num_queued")

    def __init__(self) -> None:
        self.num_queued = 0  # sent and not read yet
        self.last_arrival = 0.0
        self.clogged_until = 0.0
        self.is_cut = False  # what is under way is lost


class Connection:
    """Between one opening of a dealer and one life of a router."""

    __slots__ = ("dealer", "down", "identity", "is_open", "router", "up")

    def __init__(self, identity: bytes, dealer: "DealerLink", router: "RouterLink") -> None:
        self.identity = identity
        self.dealer = dealer
        self.router = router
        self.is_open = True
        self.up = Direction()
        self.down = Direction()


class Network:
    """All connections. At most one router listens.

    Args:
        world: clock and randomness.
        queue_limit: frames that may wait in each direction of a connection.
    """

    def __init__(self, world: World, queue_limit: int) -> None:
        self.world = world
        self.weather = Weather()
        self.queue_limit = queue_limit
        self.router: RouterLink | None = None
        self.dealers: list[DealerLink] = []

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [dealer.connection for dealer in self.dealers if dealer.connection is not None]

    def listen(self, router: "RouterLink") -> None:
        """Let a router listen; whoever looks for one finds it soon."""
        self.router = router
        for dealer in self.dealers:
            self.world.after(self._latency(), self.connect, dealer)

    def connect(self, dealer: "DealerLink") -> None:
        """Connect a dealer, if it still needs that and somebody listens."""
        if dealer in self.dealers and dealer.connection is None and not dealer.is_lost and self.router is not None:
            connection = Connection(dealer.identity, dealer, self.router)
            dealer.connection = connection
            self.router.connections[dealer.identity] = connection

    def disconnect(self, connection: Connection, *, keeps_up: bool = False, keeps_down: bool = False) -> None:
        """Close a connection; what is under way arrives or not. The dealer's side finds out after what arrives."""
        if not connection.is_open:
            return
        connection.is_open = False
        connection.up.is_cut = not keeps_up
        connection.down.is_cut = not keeps_down
        connection.router.connections.pop(connection.identity, None)
        if connection.dealer.connection is connection:
            connection.dealer.connection = None
            arrival = connection.down.last_arrival if keeps_down else 0.0
            self.world.at(max(self.world.now + self._latency(), arrival), connection.dealer.lose, connection)

    def send(self, connection: Connection, direction: Direction, frame: bytes) -> None:
        """Send a frame into the weather.

        Raises:
            SessionLost: the queue is full.
        """
        if direction.num_queued >= self.queue_limit:
            self.world.stats["queue full"] += 1
            raise SessionLost("the queue is full")
        world = self.world
        world.note(frame)
        arrival = max(world.now + self._latency(), direction.last_arrival, direction.clogged_until)
        weather = self.weather
        if (badness := weather.badness) > 0 and (draw := world.random.random()) < badness:
            frames, arrival = self._befall(draw, frame, arrival)
        else:
            frames = [frame]
            direction.last_arrival = arrival
        for each in frames:
            direction.num_queued += 1
            world.at(arrival, self._arrive, connection, direction, each)

    def _befall(self, draw: float, frame: bytes, arrival: float) -> tuple[list[bytes], float]:
        """Return what arrives of a frame, and when."""
        weather, world = self.weather, self.world
        if draw < (limit := weather.lose):
            world.stats["frames lost"] += 1
            return [], arrival
        if draw < (limit := limit + weather.duplicate):
            world.stats["frames duplicated"] += 1
            return [frame, frame], arrival
        if draw < (limit := limit + weather.reorder):
            world.stats["frames reordered"] += 1
            return [frame], arrival + world.random.uniform(0.001, 0.5)
        if draw < limit + weather.corrupt:
            world.stats["frames corrupted"] += 1
            return [self.corrupt(frame)], arrival
        world.stats["frames delayed"] += 1
        return [frame], arrival + world.random.uniform(0.1, 12.0)

    def corrupt(self, frame: bytes) -> bytes:
        """Return what is no message: cut, other bytes, or one of another protocol version."""
        random = self.world.random
        match random.randrange(12):
            case 0:
                return frame[:2] + (PROTOCOL_VERSION + 1).to_bytes(2, "little") + frame[4:]
            case 1 | 2 | 3 | 4:
                return frame[: random.randrange(len(frame))]
            case 5 | 6 | 7:
                return random.randbytes(random.randrange(200))
            case 8 | 9:
                return frame[:24] + random.randbytes(random.randrange(1, 60))
            case _:
                return b"XX" + frame[2:]

    def _latency(self) -> float:
        return self.world.random.uniform(self.weather.min_latency_s, self.weather.max_latency_s)

    def _arrive(self, connection: Connection, direction: Direction, frame: bytes) -> None:
        if direction.is_cut:
            return
        if direction is connection.up:
            connection.router.take(connection.identity, frame, direction)
        else:
            connection.dealer.take(connection, frame)


class RouterLink:
    """The scheduler's end: behaves as octavo.wire.channel.RouterChannel.

    Args:
        network: that it listens on from now on.
        wake: called when something has arrived.
    """

    def __init__(self, network: Network, wake: Callable[[], None]) -> None:
        self.num_malformed = 0
        self.num_refused = 0
        self.connections: dict[bytes, Connection] = {}
        self._network = network
        self._wake = wake
        self._inbox: deque[tuple[bytes, bytes, Direction | None]] = deque()
        self._is_open = True
        network.listen(self)

    def __len__(self) -> int:
        return len(self._inbox)

    def take(self, identity: bytes, frame: bytes, direction: Direction | None = None) -> None:
        """Let a frame arrive."""
        if self._is_open:
            self._inbox.append((identity, frame, direction))
            self._wake()

    def receive(self, limit: int) -> Iterator[tuple[bytes, Envelope, FromPeer]]:
        """Yield up to `limit` waiting messages with the identity of their sender; drop and count malformed ones."""
        inbox = self._inbox
        for _ in range(limit):
            if not inbox:
                return
            identity, frame, direction = inbox.popleft()
            if direction is not None:
                direction.num_queued -= 1
            try:
                envelope, message = decode_from_peer(frame)
            except ProtocolMismatch as error:
                self.num_malformed += 1
                self._refuse(identity, str(error))
            except MalformedMessage:
                self.num_malformed += 1
            else:
                yield identity, envelope, message

    def send(self, peer: bytes, message: FromScheduler, session: int = 0, number: int = 0) -> int:
        """Send a message to a peer.

        Raises:
            SessionLost: the peer is gone, or its queue is full.
        """
        if (connection := self.connections.get(peer)) is None:
            raise SessionLost("the peer is gone")
        frame = encode(message, session, number)
        self._network.send(connection, connection.down, frame)
        return len(frame)

    def close(self, *, keeps_sent: bool = False) -> None:
        """Listen no longer.

        Args:
            keeps_sent: whether what was sent still arrives.
        """
        self._is_open = False
        if self._network.router is self:
            self._network.router = None
        for connection in list(self.connections.values()):
            self._network.disconnect(connection, keeps_down=keeps_sent)

    def _refuse(self, peer: bytes, reason: str) -> None:
        try:
            self.send(peer, Refuse(reason))
        except SessionLost:
            self.num_malformed += 1


class DealerLink:
    """A peer's end: behaves as octavo.wire.channel.DealerChannel.

    Args:
        network: that it connects to.
        boot_id: of its process.
        wake: called when something has arrived, or the connection is lost.
    """

    def __init__(self, network: Network, boot_id: BootId, wake: Callable[[], None]) -> None:
        self.num_malformed = 0
        self.connection: Connection | None = None
        self.identity = b""
        self.is_lost = False
        self._network = network
        self._boot_id = boot_id
        self._wake = wake
        self._num_openings = 0
        self._inbox: deque[tuple[Direction, bytes]] = deque()
        self._open()

    def __len__(self) -> int:
        return len(self._inbox)

    def take(self, connection: Connection, frame: bytes) -> None:
        """Let a frame arrive."""
        if connection.identity == self.identity:
            self._inbox.append((connection.down, frame))
            self._wake()

    def lose(self, connection: Connection) -> None:
        """Find out that a connection was closed."""
        if connection.identity == self.identity:
            self.is_lost = True
            self._wake()

    def receive(self, limit: int) -> Iterator[tuple[Envelope, FromScheduler]]:
        """Yield up to `limit` waiting messages.

        Raises:
            SessionLost: the connection was closed, or a message is malformed.
            ProtocolMismatch: the scheduler speaks another protocol version.
        """
        for _ in range(limit):
            if not self._inbox:
                break
            direction, frame = self._inbox.popleft()
            direction.num_queued -= 1
            try:
                yield decode_from_scheduler(frame)
            except MalformedMessage as error:
                self.num_malformed += 1
                raise SessionLost(f"malformed message: {error}") from error
        if self.is_lost:
            raise SessionLost("the scheduler closed the connection")

    def send(self, message: FromPeer, session: int = 0, number: int = 0) -> None:
        """Send a message.

        Raises:
            SessionLost: not connected, or the queue is full.
        """
        if self.connection is None:
            raise SessionLost("the scheduler cannot be reached")
        self._network.send(self.connection, self.connection.up, encode(message, session, number))

    @property
    def has_room(self) -> bool:
        """Whether a message can be sent now (POLLOUT)."""
        return self.connection is not None and self.connection.up.num_queued < self._network.queue_limit

    def reopen(self) -> None:
        """Drop the connection with all that came over it and connect anew, under a fresh identity."""
        self.close()
        self._open()

    def close(self, linger_ms: int = 0) -> None:
        """Disconnect; what was sent still arrives if it may linger, and sometimes if not."""
        if self.connection is not None:
            keeps = linger_ms > 0 or self._network.world.chance(0.5)
            self._network.disconnect(self.connection, keeps_up=keeps)
        if self in self._network.dealers:
            self._network.dealers.remove(self)
        self._inbox.clear()

    def _open(self) -> None:
        self._num_openings += 1
        self.identity = f"{self._boot_id}.{self._num_openings}".encode()
        self.is_lost = False
        self._network.dealers.append(self)
        self._network.world.after(self._network.weather.max_latency_s, self._network.connect, self)
