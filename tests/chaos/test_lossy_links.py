"""Bad links and strangers: nothing is resent, sessions are renewed, streams are whole, no process dies."""

import asyncio
import random
import socket
from pathlib import Path

import pytest
import zmq

from octavo.wire.codec import MAX_MESSAGE_BYTES, encode
from octavo.wire.handshake import Heartbeat
from tests.chaos.conftest import Chaos, running
from tests.support.lossy_proxy import FAULTS, LossyProxy

RATE = 0.02


async def test_streams_over_a_lossy_link(folder: Path, seed: int) -> None:
    """F45, F46, F48, I12: a gap in the numbers ends a session, and the next one goes on from the journals."""
    front = f"ipc://{folder}/p"
    with LossyProxy(front, f"ipc://{folder}/s", seed, RATE) as proxy:
        async with running(folder, seed, num_frontends=2, address=front) as chaos:
            pids = {name: chaos.cluster.pid(name) for name in chaos.cluster.names}
            load = chaos.load(cancel_share=0.1)
            proxy.is_faulty = True
            load.start()
            async with asyncio.timeout(60):
                while set(proxy.faults) < set(FAULTS):  # noqa: ASYNC110  another thread counts them
                    await asyncio.sleep(0.05)
            proxy.is_faulty = False
            await load.stop()
            await chaos.judge()
            assert {name: chaos.cluster.pid(name) for name in chaos.cluster.names} == pids
            assert chaos.cluster.odd_ends() == []
            assert any("ended: message" in line for line in chaos.cluster.log_of("scheduler").splitlines())


async def test_garbage_at_the_scheduler_s_socket(folder: Path, seed: int) -> None:
    """F48: what is no message of a session is dropped, whoever sends it and however much of it; streams go on."""
    async with running(folder, seed) as chaos:
        pids = {name: chaos.cluster.pid(name) for name in chaos.cluster.names}
        load = chaos.load()
        load.start()
        await chaos.until_tokens(50)
        await asyncio.to_thread(send_garbage, chaos)
        await chaos.until_tokens(50)
        await load.stop()
        await chaos.judge()
        assert {name: chaos.cluster.pid(name) for name in chaos.cluster.names} == pids


def send_garbage(chaos: Chaos) -> None:
    """Send what no peer sends, as a stranger and as one that does not speak ZeroMQ at all."""
    draw = random.Random(chaos.seed)
    path = chaos.cluster.address.removeprefix("ipc://")
    frames: list[list[bytes]] = [[draw.randbytes(draw.randrange(1, 200))] for _ in range(3000)]
    frames += [[b""], [b"x"] * 10_000, [encode(Heartbeat(), 12345, 1)], [encode(Heartbeat(), 0, 0)[:-1]]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 2000)
        stranger.connect(chaos.cluster.address)
        for one in frames:
            stranger.send_multipart(one)
        with context.socket(zmq.DEALER) as oversize:  # libzmq closes its connection, and it alone
            oversize.setsockopt(zmq.LINGER, 100)
            oversize.connect(chaos.cluster.address)
            oversize.send(bytes(MAX_MESSAGE_BYTES + 1))
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", draw.randbytes(4096)):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.settimeout(5)
            try:
                raw.sendall(first)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                continue


@pytest.mark.parametrize("fault", ["duplicate", "drop", "late"])
def test_the_proxy_does_what_it_says(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.lossy_proxy.FAULTS", (fault,))
    front, back = f"ipc://{folder}/p", f"ipc://{folder}/s"
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as scheduler,
        context.socket(zmq.DEALER) as peer,
        LossyProxy(front, back, 0, 1.0) as proxy,
    ):
        scheduler.bind(back)
        scheduler.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.setsockopt(zmq.IDENTITY, b"me")
        peer.setsockopt(zmq.LINGER, 0)
        scheduler.setsockopt(zmq.LINGER, 0)
        peer.connect(front)
        peer.send(b"hello")
        assert scheduler.recv_multipart() == [b"me", b"hello"]
        proxy.is_faulty = True
        peer.send(b"faulty")
        while not proxy.faults:
            assert not scheduler.poll(5) or fault != "drop"
        proxy.is_faulty = False
        peer.send(b"good")
        found = [scheduler.recv_multipart()[1]]
        while b"good" not in found or (fault == "late" and len(found) < 2):
            found.append(scheduler.recv_multipart()[1])
        wanted = {"duplicate": [b"faulty", b"faulty", b"good"], "drop": [b"good"]}
        assert found == wanted.get(fault, found)
        assert sorted(found) == sorted(wanted.get(fault, [b"faulty", b"good"]))
