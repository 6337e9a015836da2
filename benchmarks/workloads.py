"""The workloads of octavo.cli.bench_workloads under the name that benchmarks use; as a program, their digests."""

import json

from octavo.cli.bench_models import VOCABULARIES
from octavo.cli.bench_workloads import (
    DECODE_BATCHES,
    Request,
    Workload,
    all_workloads,
    decode,
    offline_256,
    prefill,
    serving,
    shared_prefix,
    sharegpt_like,
    unique_prefix,
    warmup,
)

__all__ = [
    "DECODE_BATCHES",
    "VOCABULARIES",
    "Request",
    "Workload",
    "all_workloads",
    "decode",
    "offline_256",
    "prefill",
    "serving",
    "shared_prefix",
    "sharegpt_like",
    "unique_prefix",
    "warmup",
]


def main() -> None:
    """Print the digest of each workload."""
    for model, vocab_size in VOCABULARIES.items():
        for workload in (*all_workloads(vocab_size), warmup(vocab_size)):
            line = {
                "metric": "workload_requests",
                "value": len(workload.requests),
                "unit": "requests",
                "workload": workload.name,
                "vocabulary": model,
                "prompt_tokens": workload.num_prompt_tokens,
                "output_tokens": workload.num_output_tokens,
                "digest": workload.digest,
            }
            print(json.dumps(line))


if __name__ == "__main__":
    main()
