"""What a request must satisfy to be taken in. What passes here never fails in the core for its own sake."""

from octavo.scheduler.config import Limits, SchedulerConfig
from octavo.scheduler.groups import most_blocks
from octavo.scheduler.policy import POLICIES
from octavo.scheduler.sequence import Request
from octavo.scheduler.state import RequestTable
from octavo.wire.columns import column_length, unpack_ints
from octavo.wire.prefix import split_keys
from octavo.wire.requests import BeamParams, FailureCode, RequestFailed, SubmitRequest, num_candidates

MAX_GRAMMAR_BYTES = 256 * 2**20
"""Of all different grammars of live requests."""

RETRY_AFTER_S = 1.0
"""When a caller that was turned away for load should come back."""


def refusal(
    message: SubmitRequest, limits: Limits, config: SchedulerConfig, requests: RequestTable
) -> RequestFailed | None:
    """Return why a request is refused, None if it is taken."""
    # What costs little comes first: a full queue must not be kept busy by what it turns away.
    if (reason := _length_error(message, limits) or _policy_error(message, limits)) is not None:
        return RequestFailed(message.handle, FailureCode.INVALID, reason)
    if (reason := _queue_error(message, limits, config, requests)) is not None:
        return RequestFailed(message.handle, FailureCode.QUEUE_FULL, reason, RETRY_AFTER_S)
    if (reason := _grammar_error(message, requests)) is not None:
        return RequestFailed(message.handle, FailureCode.QUEUE_FULL, reason, RETRY_AFTER_S)
    if (refused := _caller_error(message, config, requests)) is not None:
        return refused
    if (reason := _key_error(message, limits) or _id_error(message, limits.vocab_size)) is not None:
        return RequestFailed(message.handle, FailureCode.INVALID, reason)
    return None


def _grammar_error(message: SubmitRequest, requests: RequestTable) -> str | None:
    if not message.grammar or message.output_ids or requests.has_grammar(message.grammar):
        return None
    if requests.num_grammar_bytes + len(message.grammar) > MAX_GRAMMAR_BYTES:
        return (
            f"the grammars of other requests take {requests.num_grammar_bytes} bytes, the limit is {MAX_GRAMMAR_BYTES}"
        )
    return None


def size_error(request: Request, limits: Limits) -> str | None:
    """Return why an admitted request cannot run with these limits, None if it can."""
    num_prompt, max_tokens = request.num_prompt_tokens, request.max_output_tokens
    if (reason := length_error(num_prompt, max_tokens, limits)) is not None or request.group is None:
        return reason
    return beams_error(num_prompt, max_tokens, request.group.search.params, len(request.stop_ids), limits)


def beams_error(
    num_prompt_tokens: int, max_tokens: int, beams: BeamParams, num_stop_ids: int, limits: Limits
) -> str | None:
    """Return why a search of this width can never run, None if it can."""
    width = beams.width
    if width > limits.max_num_seqs:
        return f"{width} beams run at once, the limit is {limits.max_num_seqs} sequences (max_num_seqs)"
    if (needed := num_candidates(beams, num_stop_ids)) > limits.vocab_size:
        return f"{width} beams and {num_stop_ids} ids that end them need {needed} ids, there are {limits.vocab_size}"
    needed = most_blocks(num_prompt_tokens, max_tokens, width, limits.block_size)
    if needed >= limits.num_blocks:
        return (
            f"{width} beams of a prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} can take {needed} "
            f"blocks of {limits.block_size} tokens: there are {limits.num_blocks - 1}"
        )
    return None


def length_error(num_prompt_tokens: int, max_tokens: int, limits: Limits) -> str | None:
    """Return why a request of these lengths can never run, None if it can."""
    limit = f"the limit is {limits.max_model_len} tokens of prompt and output together"
    if limits.max_model_len == limits.num_pool_tokens:
        limit += f" (all {limits.num_blocks - 1} blocks of {limits.block_size} tokens)"
    if num_prompt_tokens >= limits.max_model_len:
        return f"prompt of {num_prompt_tokens} tokens leaves no room for output: {limit}"
    if num_prompt_tokens + max_tokens > limits.max_model_len:
        total = num_prompt_tokens + max_tokens
        return f"prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} make {total}: {limit}"
    return None


def _length_error(message: SubmitRequest, limits: Limits) -> str | None:
    if (reason := length_error(column_length(message.prompt_ids), message.max_tokens, limits)) is not None:
        return reason
    for choice, output in enumerate(message.output_ids):
        if column_length(output) > message.max_tokens:
            return f"choice {choice} replays {column_length(output)} tokens, max_tokens is {message.max_tokens}"
    if message.beams is None:
        return None
    num_prompt, num_stop_ids = column_length(message.prompt_ids), column_length(message.stop_token_ids)
    return beams_error(num_prompt, message.max_tokens, message.beams, num_stop_ids, limits)


def _id_error(message: SubmitRequest, vocab_size: int) -> str | None:
    columns = {
        "prompt": message.prompt_ids,
        "stop_token_ids": message.stop_token_ids + message.sampling.stop_token_ids,
        "logit_bias": message.sampling.logit_bias_ids,
        "allowed_token_ids": message.sampling.allowed_token_ids,
        "bad_words": message.sampling.bad_word_ids,
    }
    columns |= {f"output of choice {choice}": ids for choice, ids in enumerate(message.output_ids)}
    for name, column in columns.items():
        if (reason := _range_error(name, column, vocab_size)) is not None:
            return reason
    return _range_error("finished_choices", message.finished_choices, message.num_choices)


def _range_error(name: str, column: bytes, end: int) -> str | None:
    ids = unpack_ints(column)
    if not ids or (min(ids) >= 0 and max(ids) < end):
        return None
    index, wrong = next((i, value) for i, value in enumerate(ids) if not 0 <= value < end)
    return f"{name}: id {wrong} at index {index} is outside [0, {end})"


def _policy_error(message: SubmitRequest, limits: Limits) -> str | None:
    if message.priority and not POLICIES[limits.scheduling_policy].uses_priorities:
        return (
            f"priority {message.priority}: only 0 is possible, the scheduling policy {limits.scheduling_policy} takes "
            "no priorities"
        )
    return None


def _key_error(message: SubmitRequest, limits: Limits) -> str | None:
    if not message.prefix_root:
        return None
    expected = column_length(message.prompt_ids) // limits.block_size
    keys = split_keys(message.prefix_keys)
    if len(keys) != expected:
        return f"prefix keys of {len(keys)} blocks, the prompt fills {expected} of {limits.block_size} tokens"
    if len(set(keys)) != expected:
        return f"prefix keys of {expected} blocks name one of them twice"  # as its table then would
    return None


def _queue_error(message: SubmitRequest, limits: Limits, config: SchedulerConfig, requests: RequestTable) -> str | None:
    if message.output_ids:
        return None  # it has started before; a frontend has MAX_REQUESTS_OF_FRONTEND at most
    if requests.num_unstarted >= config.max_waiting_requests:
        return f"{requests.num_unstarted} requests wait, the limit is {config.max_waiting_requests}"
    num_tokens = _num_queued_tokens(message)
    waiting = requests.num_unstarted_tokens
    if waiting and waiting + num_tokens > config.max_waiting_tokens:
        return f"{waiting} tokens wait, {num_tokens} more would exceed the limit of {config.max_waiting_tokens}"
    most = config.max_waiting_requests + limits.max_num_seqs
    if len(requests) >= most:  # those that lost their blocks to others do not count as unstarted
        return f"{len(requests)} requests run or wait, the limit is {most}"
    return None


def _caller_error(message: SubmitRequest, config: SchedulerConfig, requests: RequestTable) -> RequestFailed | None:
    if message.output_ids:
        return None  # it was admitted before
    limit, held = config.max_requests_per_caller, requests.num_of_caller(message.caller)
    if limit and held >= limit:
        reason = f"this caller has {held} requests, the limit is {limit} (--max-requests-per-caller)"
        having = (("max_requests_per_caller", limit), ("requests", held))
        return RequestFailed(message.handle, FailureCode.CALLER_LIMIT, reason, RETRY_AFTER_S, having)
    num_tokens = _num_queued_tokens(message)
    limit, held = config.max_waiting_tokens_per_caller, requests.waiting_tokens_of_caller(message.caller)
    if limit and held and held + num_tokens > limit:
        reason = (
            f"{held} tokens of this caller wait, {num_tokens} more would exceed the limit of {limit} "
            "(--max-waiting-tokens-per-caller)"
        )
        waiting = (("max_waiting_tokens_per_caller", limit), ("waiting_tokens", held), ("request_tokens", num_tokens))
        return RequestFailed(message.handle, FailureCode.CALLER_LIMIT, reason, RETRY_AFTER_S, waiting)
    return None


def _num_queued_tokens(message: SubmitRequest) -> int:
    num_sequences = message.num_choices if message.beams is None else message.beams.width
    return column_length(message.prompt_ids) * num_sequences
