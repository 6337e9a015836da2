"""A whole service of random weights under clients: what its streams deliver, over gRPC and over HTTP.

    python -m benchmarks.served --model llama-3.1-8b --out rows.jsonl [--concurrency 64 256] [--num-frontends N]

serves a model of `octavo.cli.bench_models` with dummy weights and a made-up tokenizer of its size, on ports of its own, and
runs `octavo bench serve --dataset-name serving` against each door: a closed loop of streaming clients in processes of
their own, as the peers' rows have it. Before each load other requests warm the door, and the prefix cache is emptied. A
row also says what share of a core each part of the service took (`frontend_cpu_percent`, ...; start and end of the client
processes are within the time). Exits with 1 if a load failed.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks._processes import end
from octavo.cli.bench_models import CONFIGS, write_config_folder
from octavo.cli.bench_signals import ending_in_order, held

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
DOORS = ("grpc", "http")
ROLES = ("frontend", "scheduler", "worker")
PEERS = Path(__file__).parent / "peers" / "vllm_0.26_h200.jsonl"
START_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 420.0
POLL_INTERVAL_S = 0.2
WARMUP_INPUT_LEN, WARMUP_OUTPUT_LEN = 128, 32


@dataclass(frozen=True)
class Service:
    """A service that runs.

    Attributes:
        process: its first one.
        ports: by door.
        start_s: until it was ready.
    """

    process: psutil.Process
    ports: dict[str, int]
    start_s: float

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of all processes of each role, so far."""
        used = dict.fromkeys(ROLES, 0.0)
        for process in self.process.children(recursive=True):
            role = next((argument for argument in process.cmdline() if argument in ROLES), None)
            if role is not None:
                times = process.cpu_times()
                used[role] += times.user + times.system
        return used


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level tokenizer of `vocab_size` ids, each with a text of its own; nothing is ever encoded with it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(alphabet)}
    vocab |= {f"Ġw{number}": number for number in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def service(options: argparse.Namespace, folder: Path) -> Iterator[Service]:
    """Serve the model of a folder, and yield the service once it is ready.

    Raises:
        RuntimeError: it is not ready in time, or has ended.
    """
    ports = {door: free_port() for door in DOORS}
    command = [*OCTAVO, "serve", str(folder), "--load-format", "dummy", "--served-model-name", options.model]
    command += ["--grpc-port", str(ports["grpc"]), "--http-port", str(ports["http"]), "--log-level", "warning"]
    command += ["--num-frontends", str(options.num_frontends), *options.serve_args.split()]
    process = subprocess.Popen(command)
    try:
        start_s = _wait_ready(process, ports["http"])
        yield Service(psutil.Process(process.pid), ports, start_s)
    finally:
        with held():
            end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", port: int) -> float:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < START_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                if answer.status == 200:
                    print(f"# ready after {passed:.1f} s", flush=True)
                    return passed
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # it is not there, or answers 503
        time.sleep(POLL_INTERVAL_S)
    raise RuntimeError(f"the service is not ready after {START_TIMEOUT_S:g} s")


def load(options: argparse.Namespace, served: Service, door: str, concurrency: int) -> bool:
    """Put a closed loop on a door and add its row to the file; say whether every request was answered."""
    command = [*OCTAVO, "bench", "serve", "--max-concurrency", str(concurrency), "--model", options.model]
    command += ["--num-clients", str(options.num_clients), "--vocab-size", str(CONFIGS[options.model]["vocab_size"])]
    port = served.ports[door]
    command += ["--address", f"127.0.0.1:{port}"] if door == "grpc" else ["--base-url", f"http://127.0.0.1:{port}"]
    print(f"# {door}, {concurrency} clients", flush=True)
    _warm_up(command, concurrency)
    reset = [*OCTAVO, "cache", "reset", "--address", f"127.0.0.1:{served.ports['grpc']}"]
    subprocess.run(reset, timeout=LOAD_TIMEOUT_S, check=True)
    row_file = options.out.with_suffix(".row")
    command += ["--dataset-name", "serving", "--output-json", str(row_file), "--peers", str(PEERS)]
    command += ["--label", options.label] if options.label else []
    began, before = time.monotonic(), served.cpu_s()
    code = subprocess.run(command, timeout=LOAD_TIMEOUT_S, check=False).returncode
    after, passed = served.cpu_s(), time.monotonic() - began
    shares = {f"{role}_cpu_percent": round(100 * (after[role] - before[role]) / passed, 1) for role in ROLES}
    print(f"# % of a core: {shares}", flush=True)
    if not row_file.exists():
        return False
    row = json.loads(row_file.read_text())
    row_file.unlink()
    about = {"engine": "octavo", "version": row["client_version"], "commit": options.commit or row["client_commit"]}
    about |= {
        "device": row["client_device"],
        "num_frontends": options.num_frontends,
        "start_s": round(served.start_s, 1),
    }
    with options.out.open("a") as file:
        file.write(json.dumps(about | row | shares) + "\n")
    return code == 0


def _warm_up(command: list[str], concurrency: int) -> None:
    sizes = ["--num-prompts", str(concurrency), "--random-input-len", str(WARMUP_INPUT_LEN)]
    sizes += ["--random-output-len", str(WARMUP_OUTPUT_LEN)]
    done = subprocess.run(
        [*command, *sizes], timeout=LOAD_TIMEOUT_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.stdout.write(done.stdout.decode("utf-8", "replace"))
        raise RuntimeError(f"the warm-up failed with status {done.returncode}")


def main() -> None:
    """Serve, load, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="llama-3.1-8b")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[64, 256], help="clients of a closed loop")
    parser.add_argument("--num-clients", type=int, default=4, help="client processes")
    parser.add_argument("--num-frontends", type=int, default=1)
    parser.add_argument("--serve-args", default="", help="further flags of octavo serve, in one word")
    parser.add_argument("--label", help="written into the rows")
    parser.add_argument("--commit", help="of Octavo, where there is no git to ask")
    parser.add_argument("--out", type=Path, required=True, help="file that the rows are added to")
    options = parser.parse_args()
    failed = []
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="octavo-served-") as parent:
        folder = write_config_folder(options.model, Path(parent))
        write_tokenizer(folder, CONFIGS[options.model]["vocab_size"])
        with service(options, folder) as served:
            for door in options.doors:
                failed += [f"{door} {n}" for n in options.concurrency if not load(options, served, door, n)]
    if failed:
        sys.exit(f"requests failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
