"""Try compose.yaml in real containers: it becomes healthy, streams, and survives the death of what is behind the frontend.

    python deploy/try_containers.py [--tcp] [--keys] [--base-image TAG] [--no-build] ...

Needs Docker with Compose and some minutes; run it with the Python that Octavo is installed for. It builds the images,
starts a project of its own name on free ports of loopback, writes a line of JSON for each thing seen, and removes
containers and volumes. The worker runs the reference backend, whose ids do not depend on a replay: a stream that brings
another text than the undisturbed one is an error. Exit status 1 at the first thing that is not as it should be.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from stream_clients import STREAM_TIMEOUT_S, Clients

ROOT = Path(__file__).parents[1]
ROLES = ("frontend", "scheduler", "worker")
UID = 10001
LOOK = (
    "id -u; (: > /x) 2>&1; (: > /var/lib/octavo/x) 2>&1; grep -E 'CapEff|NoNewPrivs' /proc/1/status; ls /sys/class/net"
)
SHORT_TOKENS = 12
LONG_TOKENS = 4096
"""More than can come within the grace."""
COMMAND_TIMEOUT_S = 1800.0
HEALTHY_TIMEOUT_S = 180.0


class NotAsItShouldBe(Exception):
    """What was seen differs from what was promised."""


def check(holds: bool, words: str) -> None:
    """Raise NotAsItShouldBe unless it holds."""
    if not holds:
        raise NotAsItShouldBe(words)


def tell(what: str, **seen: Any) -> None:
    """Write a line of JSON."""
    print(json.dumps({"seen": what, **seen}), flush=True)


class Project:
    """The project of compose.yaml under a name of its own.

    Args:
        options: of the command line.
        work: a folder for files of this run.
    """

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.name = f"octavo-try-{os.getpid()}"
        self.grpc_port, self.http_port, self._scheduler_port = free_ports(3)
        self.key = ""
        self._overrides = [name for name in ("tcp", "keys") if getattr(options, name)]
        self._work = work
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": self.name,
            "COMPOSE_PROFILES": "cpu",
            "COMPOSE_PROGRESS": "plain",
            "OCTAVO_IMAGE": "octavo-try",
            "OCTAVO_GRPC_PORT": str(self.grpc_port),
            "OCTAVO_HTTP_PORT": str(self.http_port),
            "OCTAVO_SCHEDULER_PORT": str(self._scheduler_port),
            "OCTAVO_UID": str(os.getuid() or UID),
            "OCTAVO_SECRETS": str(work / "secrets"),
        }
        if options.base_image:
            self._environment["OCTAVO_BASE_IMAGE"] = options.base_image
        if options.torch_index:
            self._environment["OCTAVO_TORCH_INDEX_URL"] = options.torch_index
        own: dict[str, dict[str, Any]] = {name: {} for name in (*ROLES, "init")}
        own["worker"]["environment"] = {"OCTAVO_BACKEND": "reference", "OCTAVO_NUM_THREADS": "1"}
        if options.build_on_host_network:
            for service in own.values():
                service["build"] = {"network": "host"}
        (work / "own.yaml").write_text(yaml.safe_dump({"services": own}))
        files = ["compose.yaml", *(f"deploy/compose.{name}.yaml" for name in self._overrides), str(work / "own.yaml")]
        self._command = [*options.compose.split(), "--project-directory", str(ROOT), *(f"--file={f}" for f in files)]
        self._make_secrets()

    def run(self, *words: str, quiet: bool = True) -> str:
        """Run a command of Compose; return what it writes."""
        done = subprocess.run(
            [*self._command, *words],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            stderr=subprocess.PIPE if quiet else None,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        check(done.returncode == 0, f"compose {' '.join(words)}: {(done.stderr or '')[-2000:]}")
        return done.stdout or ""

    def state(self, service: str) -> dict[str, Any]:
        """Return what Docker knows of a service's container."""
        (found,) = self.run("ps", "--all", "--quiet", service).split()
        command = ["docker", "inspect", found]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        (container,) = json.loads(done.stdout)
        return dict(container)

    def wait_until_healthy(self, service: str) -> float:
        """Return how long it took."""
        started = time.monotonic()
        while (health := self.state(service)["State"]["Health"]["Status"]) != "healthy":
            check(time.monotonic() - started < HEALTHY_TIMEOUT_S, f"{service} is {health}")
            time.sleep(0.5)
        return time.monotonic() - started

    def kill(self, service: str) -> None:
        """Kill what runs in a container, as the kernel's out-of-memory killer would: Docker takes it for a crash."""
        with contextlib.suppress(NotAsItShouldBe):  # the command dies with its container
            self.run("exec", "-T", service, "sh", "-c", "kill -9 -1")

    def _make_secrets(self) -> None:
        folder = self._work / "secrets"
        if "tcp" in self._overrides:
            subprocess.run(
                [sys.executable, "-m", "octavo.cli.main", "keys", str(folder)], check=True, stdout=subprocess.DEVNULL
            )
        else:
            folder.mkdir(mode=0o700)
        if "keys" in self._overrides:
            self.key = secrets.token_hex(24)
            (folder / "api_keys").write_text(f"{self.key}\n")
        if os.getuid() == 0:
            self._work.chmod(0o755)
            os.chown(folder, UID, UID)
            for path in folder.iterdir():
                path.chmod(0o600)
                os.chown(path, UID, UID)


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]


def confinement(project: Project) -> None:
    """See what processes in the containers may do."""
    for service in ROLES:
        seen = project.run("exec", "-T", service, "sh", "-c", LOOK)
        check(not seen.startswith("0\n"), f"{service} runs as root")
        check(seen.count("Read-only file system") == 2, f"{service} can write: {seen}")
        check(re.search(r"CapEff:\s+0+$", seen, re.M) is not None, f"{service} has capabilities")
        check(re.search(r"NoNewPrivs:\s+1$", seen, re.M) is not None, f"{service} can gain privileges")
        networks = [line for line in seen.splitlines() if line in ("lo",) or line.startswith("eth")]
        tell("confinement", service=service, interfaces=networks, read_only=True, capabilities=0, uid=seen.split()[0])


def undisturbed(clients: Clients) -> dict[str, str]:
    """Stream at both doors; return the text of each."""
    streams = clients.start()
    for door, stream in streams.items():
        check(stream.ended.wait(STREAM_TIMEOUT_S), f"{door}: no end")
        check(stream.end == "length", f"{door}: {stream.end}")
        tell("stream", door=door, pieces=len(stream.times), characters=len(stream.text))
    texts = {door: stream.text for door, stream in streams.items()}
    check(texts["grpc"] == texts["http"], "the doors differ")
    return texts


def streams_go_on(
    project: Project, clients: Clients, wanted: dict[str, str], service: str, how: str, disturb: Callable[[], None]
) -> None:
    """Disturb a service under two streams; they must end complete, and the service must be healthy again."""
    before = project.state(service)
    streams = clients.start()
    for door, stream in streams.items():
        check(stream.enough.wait(STREAM_TIMEOUT_S), f"{door}: it does not begin")
    disturb()
    for door, stream in streams.items():
        check(stream.ended.wait(STREAM_TIMEOUT_S), f"{door}: no end after {how} of the {service}")
        check(stream.end == "length", f"{door}: {stream.end} after {how} of the {service}")
        check(stream.text == wanted[door], f"{door}: another text after {how} of the {service}")
    healthy_s = project.wait_until_healthy(service)
    after = project.state(service)
    began = [state["State"]["StartedAt"] for state in (before, after)]
    check(began[0] != began[1], f"the {service} was not started again")
    tell(
        f"streams go on after {how}",
        service=service,
        longest_pause_s={door: round(stream.longest_pause_s, 2) for door, stream in streams.items()},
        healthy_after_streams_s=round(healthy_s, 1),
        docker_restarts=after["RestartCount"],
    )


def frontend_dies(project: Project, clients: Clients) -> None:
    """Its streams end with an error; it is started again, and serves."""
    streams = clients.start()
    for stream in streams.values():
        check(stream.enough.wait(STREAM_TIMEOUT_S), "it does not begin")
    project.kill("frontend")
    for door, stream in streams.items():
        check(stream.ended.wait(STREAM_TIMEOUT_S) and stream.end != "length", f"{door}: {stream.end}")
    tell("streams end with their frontend", ends={door: stream.end for door, stream in streams.items()})
    time.sleep(1.0)  # Docker notices
    project.wait_until_healthy("frontend")
    undisturbed(clients)


def stop_in_order(project: Project, clients: Clients) -> None:
    """Stop with streams open: short ones end complete, and no process has to be killed."""
    streams = clients.start(SHORT_TOKENS)
    for stream in streams.values():
        check(stream.enough.wait(STREAM_TIMEOUT_S), "it does not begin")
    started = time.monotonic()
    project.run("stop")
    took = time.monotonic() - started
    for door, stream in streams.items():
        check(stream.end == "length", f"{door}: {stream.end}")
    codes = {service: project.state(service)["State"]["ExitCode"] for service in ROLES}
    check(set(codes.values()) == {0}, f"exit codes {codes}")
    tell("stop lets streams end", took_s=round(took, 1), exit_codes=codes)


def stop_beyond_the_grace(project: Project, clients: Clients) -> None:
    """Stop with streams that cannot end in time: they are ended, and nobody has to be killed."""
    project.run("start")
    for service in reversed(ROLES):
        project.wait_until_healthy(service)
    streams = clients.start(LONG_TOKENS)
    for stream in streams.values():
        check(stream.enough.wait(STREAM_TIMEOUT_S), "it does not begin")
    started = time.monotonic()
    project.run("stop")
    took = time.monotonic() - started
    codes = {service: project.state(service)["State"]["ExitCode"] for service in ROLES}
    check(set(codes.values()) == {0}, f"exit codes {codes}")
    ends = {door: stream.end for door, stream in streams.items() if stream.ended.wait(10.0)}
    tell("stop ends streams after the grace", took_s=round(took, 1), exit_codes=codes, ends=ends)


def campaign(project: Project, build: bool) -> None:
    """Do all of it."""
    if build:
        started = time.monotonic()
        project.run("build", *ROLES, quiet=False)
        tell("built", took_s=round(time.monotonic() - started))
    started = time.monotonic()
    project.run("up", "--detach", "--wait", "--no-build")
    tell("up: all healthy", took_s=round(time.monotonic() - started), model_fetched="OCTAVO_MODELS" not in os.environ)
    clients = Clients(project.grpc_port, project.http_port, project.key)
    confinement(project)
    wanted = undisturbed(clients)
    for service in ("worker", "scheduler"):
        streams_go_on(project, clients, wanted, service, "kill -9", lambda service=service: project.kill(service))
    replace = functools.partial(
        project.run, "up", "--detach", "--no-deps", "--no-build", "--force-recreate", "scheduler"
    )
    streams_go_on(project, clients, wanted, "scheduler", "replacement", lambda: bool(replace()) and None)
    frontend_dies(project, clients)
    stop_in_order(project, clients)
    stop_beyond_the_grace(project, clients)


@contextlib.contextmanager
def index_of(wheels: Path | None, work: Path) -> Iterator[str]:
    """Serve a folder of wheels of torch as a package index on loopback; yield its address, '' without a folder."""
    if wheels is None:
        yield ""
        return
    (work / "index").mkdir()
    (work / "index" / "torch").symlink_to(wheels.resolve())
    handler = functools.partial(_QuietHandler, directory=str(work / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compose", default="docker compose", help="the command of Compose")
    parser.add_argument("--tcp", action="store_true", help="with deploy/compose.tcp.yaml and keys of its own")
    parser.add_argument("--keys", action="store_true", help="with deploy/compose.keys.yaml and a key of its own")
    parser.add_argument("--base-image", help="instead of the Dockerfile's (deploy/base_image.sh makes one)")
    parser.add_argument("--torch-wheels", type=Path, help="a folder with torch's wheel, instead of its index")
    parser.add_argument("--build-on-host-network", action="store_true", help="needed by --torch-wheels")
    parser.add_argument(
        "--no-build", dest="build", action="store_false", help="the images are there from an earlier run"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is removed then, too
    with (
        tempfile.TemporaryDirectory(prefix="octavo-try-") as folder,
        index_of(options.torch_wheels, Path(folder)) as at,
    ):
        options.torch_index = at
        project = Project(options, Path(folder))
        try:
            campaign(project, options.build)
        except NotAsItShouldBe as error:
            tell("NOT AS IT SHOULD BE", reason=str(error))
            print(project.run("logs", "--no-color", "--tail", "40"), file=sys.stderr)
            return 1
        finally:
            project.run("down", "--volumes", "--timeout", "10")
    tell("all as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
