"""Checks of StoppingParams: when generation ends."""

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb

MAX_TIME_LIMIT_S = 86_400


def check_stop_strings(stopping: pb.StoppingParams, config: FrontendConfig, detokenize: bool) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        InvalidArgument: too many, one that is empty or too long, or any where no text is made.
    """
    path, stops = "input.stopping.stop_strings", stopping.stop_strings
    if len(stops) > config.max_stop_strings:
        raise InvalidArgument(f"{len(stops)} entries, limit {config.max_stop_strings}", field_path=path)
    if stops and not detokenize:
        raise InvalidArgument("stop strings need text, and output.detokenize is false", field_path=path)
    for i, stop in enumerate(stops):
        if not stop:
            raise InvalidArgument("a stop string must not be empty", field_path=f"{path}[{i}]")
        if len(stop) > config.max_stop_string_chars:
            message = f"{len(stop)} characters, limit {config.max_stop_string_chars}"
            raise InvalidArgument(message, field_path=f"{path}[{i}]")
    return tuple(stops)


def check_token_limits(stopping: pb.StoppingParams, max_model_len: int, shows_prompt: bool) -> tuple[int, int | None]:
    """Return min_tokens, and max_tokens as far as it is set.

    Args:
        stopping: what the request says.
        max_model_len: most tokens of prompt and output.
        shows_prompt: whether the answer has something in it without any token of output.

    Raises:
        InvalidArgument: one is out of its range.
    """
    max_tokens = None
    if stopping.HasField("max_tokens"):
        max_tokens = stopping.max_tokens
        if max_tokens < 1 and not shows_prompt:
            message = "0 must be at least 1, without echo or prompt log-probabilities"
            raise InvalidArgument(message, field_path="input.stopping.max_tokens")
    min_tokens = stopping.min_tokens if stopping.HasField("min_tokens") else 0
    limit = max_model_len if max_tokens is None else min(max_tokens, max_model_len)
    if min_tokens > limit:
        name = "max_model_len" if max_tokens is None or max_tokens > limit else "max_tokens"
        raise InvalidArgument(f"{min_tokens}, limit {limit} ({name})", field_path="input.stopping.min_tokens")
    return min_tokens, max_tokens


def check_time_limit(stopping: pb.StoppingParams) -> float | None:
    """Return the time limit in seconds, None without one.

    Raises:
        InvalidArgument: it is not above 0, or more than a day.
    """
    if not stopping.HasField("time_limit"):
        return None
    limit = stopping.time_limit
    seconds: float = limit.seconds + limit.nanos / 1e9
    if not 0 <= limit.nanos < 10**9 or not 0 < seconds <= MAX_TIME_LIMIT_S:
        message = f"{limit.seconds} s and {limit.nanos} ns, must be above 0 and at most {MAX_TIME_LIMIT_S} s"
        raise InvalidArgument(message, field_path="input.stopping.time_limit")
    return seconds
