"""What the scheduler and a worker count, beside what the scheduler's StatusReport says in fields of its own.

All label values are bounded sets. A name that ends with a process's doing says `scheduler_` or `worker_`; what is the
service's, whoever counts it, does not.
"""

from octavo.wire.metrics import Layout
from octavo.wire.requests import FailureCode

ROLES = ("frontend", "worker")

CAUSES = (
    "left",
    "unreachable",
    "silent",
    "step_timeout",
    "protocol",
    "began_anew",
    "other_limits",
    "scheduler_left",
)
"""Why a session ended: the peer said Goodbye; its connection closed, or it did not keep up; no word of it for 10 s; no step
finished in time; it sent what cannot be; it said Hello again; a new worker has other limits; the scheduler left."""

WAITING_FOR = ("rows", "blocks", "tokens", "own_ids", "plan_size", "worker", "next_plan", "adoption", "other")
"""What the next waiting sequence waits for: --max-num-seqs, the KV cache, --max-num-batched-tokens, ids of its own that are
being drawn, room in a message, a worker, its turn, requests that may go on from a worker's rows, or something that a newer
scheduler knows."""

FAULTS = ("nonfinite_logits", "no_candidate", "grammar")

STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    10.0,
    60.0,
    300.0,
)
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PLAN_BYTES = (128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0, 262144.0, 1048576.0, 16777216.0)


class SchedulerLayout(Layout):
    """The scheduler's row."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting_for = self.gauge(
            "scheduler_waiting_for", "1 for what the next waiting sequence waits for, else 0.", reason=WAITING_FOR
        )
        self.waiting_tokens = self.gauge(
            "scheduler_waiting_tokens", "Prompt tokens, times choices, of requests that wait for their first step."
        )
        self.frontends = self.gauge("scheduler_frontends", "Frontends in session.")
        self.submitted = self.counter(
            "scheduler_requests_submitted",
            "Requests that frontends brought; again: from their journals, to a new session.",
            kind=("new", "again"),
        )
        self.failed = self.counter(
            "scheduler_requests_failed",
            "Requests refused, or ended without an answer.",
            reason=[code.name.lower() for code in FailureCode],
        )
        self.step_seconds = self.histogram(
            "scheduler_step_duration_seconds",
            "Of a step as the scheduler sees it: from the result before it, or from its plan if none was under way.",
            STEP_SECONDS,
        )
        self.step_tokens = self.histogram("scheduler_step_tokens", "Tokens that a plan has computed.", STEP_TOKENS)
        self.plan_bytes = self.histogram("scheduler_plan_bytes", "Size of a plan as it is sent.", PLAN_BYTES)
        self.begun = self.counter(
            "scheduler_sessions_begun", "Sessions that began; those of a worker are the epochs.", role=ROLES
        )
        self.ended = self.counter("scheduler_sessions_ended", "Sessions that ended.", role=ROLES, cause=CAUSES)
        self.refused = self.counter("scheduler_hellos_refused", "Peers that were turned away for good.", role=ROLES)
        self.strays = self.counter("scheduler_stray_messages", "Messages of sessions that do not exist: dropped.")
        self.malformed = self.counter(
            "scheduler_malformed_frames", "Frames that are no message of this protocol version: dropped."
        )
        self.shut_out = self.counter(
            "scheduler_connections_refused", "Connections over tcp that hold no key of a known peer."
        )
        self.old_results = self.counter("scheduler_old_results", "Results of earlier epochs: ignored.")


class WorkerLayout(Layout):
    """A worker's row."""

    def __init__(self) -> None:
        super().__init__()
        self.compute_seconds = self.histogram(
            "worker_step_compute_seconds",
            "Of a step in the worker; on a GPU, where steps overlap, since the result before it.",
            STEP_SECONDS,
        )
        self.sampled = self.counter(
            "worker_sampled_tokens", "Tokens drawn, those that nobody wanted any more included."
        )
        self.faults = self.counter("worker_row_faults", "Rows that could draw nothing.", kind=FAULTS)
        self.refused = self.counter("worker_plans_refused", "Plans that contradict the rows: they end the session.")
        self.sessions = self.counter("worker_sessions_begun", "Sessions with a scheduler.")
        self.dropped = self.counter("worker_stray_messages", "Messages of other sessions: dropped.")
        self.malformed = self.counter("worker_malformed_frames", "Frames that are no message: dropped.")
        self.rows = self.gauge("worker_rows", "Rows in use.")
        self.grammar_rows = self.gauge("worker_grammar_rows", "Of these, rows that follow a grammar.")
        self.in_flight = self.gauge("worker_plans_in_flight", "Plans launched whose results are not there.")
        self.load_seconds = self.gauge("worker_load_duration_seconds", "From the start of loading to ready.")
        self.weights_bytes = self.gauge("worker_weights_bytes", "Of the weights.")
        self.kv_bytes = self.gauge("worker_kv_cache_bytes", "Of the KV cache.")
        self.device_allocated = self.gauge(
            "worker_device_memory_allocated_bytes", "Of the device, in tensors of this process; 0 on a CPU."
        )
        self.device_reserved = self.gauge(
            "worker_device_memory_reserved_bytes", "Of the device, held by this process's allocator; 0 on a CPU."
        )
        self.device_total = self.gauge("worker_device_memory_bytes", "Memory of the device; of the machine on a CPU.")


SCHEDULER = SchedulerLayout()
WORKER = WorkerLayout()
