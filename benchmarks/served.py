"""A whole service of random weights under clients: what its streams deliver, over gRPC and over HTTP.

    python -m benchmarks.served --model llama-3.1-8b --out rows.jsonl [--concurrency 64 256] [--num-frontends N]

serves a model of `octavo.cli.bench_models` with dummy weights and a made-up tokenizer of its size, on ports of its own, and
runs `octavo bench serve --dataset-name serving` against each door: a closed loop of streaming clients in processes of
their own, as the peers' rows have it. Exits with 1 if a load failed.
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
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks._processes import end
from octavo.cli.bench_models import CONFIGS, write_config_folder
from octavo.cli.bench_signals import ending_in_order, held

OCTAVO = [sys.executable, "-m", "octavo.cli.main"]
DOORS = ("grpc", "http")
PEERS = Path(__file__).parent / "peers" / "vllm_0.26_h200.jsonl"
START_TIMEOUT_S, LOAD_TIMEOUT_S = 300.0, 420.0
POLL_INTERVAL_S = 0.2


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
def service(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, int]]:
    """Serve the model of a folder, and yield the port of each door once it is ready.

    Raises:
        RuntimeError: it is not ready in time, or has ended.
    """
    ports = {door: free_port() for door in DOORS}
    command = [*OCTAVO, "serve", str(folder), "--load-format", "dummy", "--served-model-name", options.model]
    command += ["--grpc-port", str(ports["grpc"]), "--http-port", str(ports["http"]), "--log-level", "warning"]
    command += ["--num-frontends", str(options.num_frontends), *options.serve_args.split()]
    process = subprocess.Popen(command)
    try:
        _wait_ready(process, ports["http"])
        yield ports
    finally:
        with held():
            end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_TIMEOUT_S:
        if process.poll() is not None:
            raise RuntimeError(f"the service ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                if answer.status == 200:
                    print(f"# ready after {time.monotonic() - began:.1f} s", flush=True)
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # it is not there, or answers 503
        time.sleep(POLL_INTERVAL_S)
    raise RuntimeError(f"the service is not ready after {START_TIMEOUT_S:g} s")


def load(options: argparse.Namespace, door: str, port: int, concurrency: int) -> bool:
    """Put a closed loop on a door; say whether every request was answered."""
    command = [*OCTAVO, "bench", "serve", "--dataset-name", "serving", "--max-concurrency", str(concurrency)]
    command += ["--num-clients", str(options.num_clients), "--num-warmups", str(concurrency)]
    command += ["--output-json", str(options.out), "--model", options.model, "--peers", str(PEERS)]
    command += ["--label", options.label] if options.label else []
    command += ["--vocab-size", str(CONFIGS[options.model]["vocab_size"])]
    command += ["--address", f"127.0.0.1:{port}"] if door == "grpc" else ["--base-url", f"http://127.0.0.1:{port}"]
    print(f"# {door}, {concurrency} clients", flush=True)
    return subprocess.run(command, timeout=LOAD_TIMEOUT_S, check=False).returncode == 0


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
    parser.add_argument("--out", type=Path, required=True, help="file that the rows are added to")
    options = parser.parse_args()
    failed = []
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="octavo-served-") as parent:
        folder = write_config_folder(options.model, Path(parent))
        write_tokenizer(folder, CONFIGS[options.model]["vocab_size"])
        with service(options, folder) as ports:
            for door in options.doors:
                failed += [f"{door} {n}" for n in options.concurrency if not load(options, door, ports[door], n)]
    if failed:
        sys.exit(f"requests failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
