"""How long `octavo worker` takes from the start of its process until it is ready, with random weights.

    python tests/gpu/start_time.py --model llama-3.1-8b [-- WORKER ARGUMENTS]

prints one line of JSON: seconds until its first words to the scheduler (the interpreter and the imports), until it is
ready, and the worker's own lines on the way.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from octavo.cli.bench_models import CONFIGS, write_config_folder
from octavo.wire.handshake import WorkerHello
from tests.support import worker_scheduler
from tests.support.worker_process import WorkerProcess

START_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=CONFIGS)
    parser.add_argument("arguments", nargs="*", help="given to the worker as they are")
    options = parser.parse_args()
    worker_scheduler.WAIT_S = START_LIMIT_S
    with tempfile.TemporaryDirectory() as name, zmq.Context() as context:
        folder = Path(name)
        model = write_config_folder(options.model, folder)
        with WorkerProcess(context, folder, model, "--load-format", "dummy", *options.arguments) as worker:
            worker.scheduler.hear(WorkerHello)
            heard_s = time.monotonic() - worker.started
            facts = worker.ready()
            ready_s = time.monotonic() - worker.started
            lines = [line for line in worker.output.splitlines() if "ready in" in line or "captured" in line]
    row = {"metric": "start", "model": options.model, "imported_s": round(heard_s, 2), "ready_s": round(ready_s, 2)}
    print(json.dumps(row | {"device": facts.device, "num_blocks": facts.num_blocks, "log": lines}))  # noqa: T201


if __name__ == "__main__":
    main()
