"""From a GenerationInput to a GenerationCall, or to an error that names field, value and limit.

Everything is checked here, before anything is allocated for the request: what passes can run.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.frontend.beams import check_beams
from octavo.frontend.config import FrontendConfig
from octavo.frontend.constraint import Constraint, check_ending, read_constraint
from octavo.frontend.errors import ContextLengthExceeded, InvalidArgument
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.stopping import check_stop_strings, check_time_limit, check_token_limits
from octavo.frontend.tools.definitions import num_tool_bytes
from octavo.frontend.unknown_fields import check_known, submessages
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import pack_floats, pack_ints
from octavo.wire.plan import RowSampling
from octavo.wire.requests import BeamParams, num_candidates

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: dividing by them would overflow."""

MIN_REPETITION_PENALTY = 0.01
"""Smaller ones only make logits overflow."""
MAX_TEMPERATURE = 1e6
"""Beyond it every distribution is flat in float32."""

INT32_MAX = 2**31 - 1

MAX_CACHE_SALT_BYTES = 256


@dataclass(frozen=True)
class Bounds:
    """What a request may ask of this model and service.

    Attributes:
        config: the frontend's limits.
        vocab_size: of the embedding; ids lie below.
        max_model_len: most tokens of prompt and output together.
        defaults: what unset sampling parameters mean.
        eos_ids: ids that end a sequence unless ignored.
        scheduling_policy: of the scheduler.
        takes_priorities: whether it uses priorities.
    """

    config: FrontendConfig
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults
    eos_ids: tuple[int, ...]
    scheduling_policy: str = "fcfs"
    takes_priorities: bool = False


@dataclass(frozen=True)
class GenerationParams:
    """Everything of a request but its prompt, checked and resolved.

    Attributes:
        num_choices: n.
        sampling: for the worker; the seed is drawn if it was unset.
        max_tokens: None means the remaining context.
        min_tokens: no end before.
        ending_ids: ids that end a choice, end of sequence included unless ignored.
        caller_stop_ids: those that the caller named.
        stop_strings, include_stop_string: as asked.
        logprobs: number of log-probabilities beside the drawn one; None if not asked for.
        token_ids, skip_special_tokens, detokenize: as asked.
        priority: lower runs earlier.
        cache_salt: what keeps the request's part of the prefix cache apart.
        constraint: what form each choice's text must have.
        time_limit_s: after so long, from the call's arrival on, all choices end with what there is.
        prompt_logprobs: number of log-probabilities beside that of each prompt token; None if not asked for.
        echo: whether the prompt's text stands before each choice's.
        beams: the choices are not drawn, but the best that a search finds.
    """

    num_choices: int
    sampling: RowSampling
    max_tokens: int | None
    min_tokens: int
    ending_ids: frozenset[int]
    caller_stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    include_stop_string: bool
    logprobs: int | None
    token_ids: bool
    skip_special_tokens: bool
    detokenize: bool
    priority: int
    cache_salt: str
    constraint: Constraint | None = None
    time_limit_s: float | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    beams: BeamParams | None = None


@dataclass(frozen=True)
class GenerationCall:
    """A request that can run."""

    params: GenerationParams
    prompt_ids: bytes  # int32 column
    num_prompt_tokens: int
    max_tokens: int  # of each choice
    echo: str | None = None  # the prompt's text, where it is wanted


def check_params(request: pb.GenerationInput, bounds: Bounds) -> GenerationParams:
    """Check everything but the prompt.

    Raises:
        InvalidArgument: names field, value and limit.
    """
    for path, message in submessages(request):
        check_known(message, path)
    sampling, stopping, output = request.sampling, request.stopping, request.output
    config = bounds.config
    num_choices = _integer("input.sampling.n", sampling.n, 1, config.max_n) if sampling.HasField("n") else 1
    beams = check_beams(request, num_choices, config)
    most_logprobs = min(config.max_logprobs, bounds.vocab_size)
    logprobs = prompt_logprobs = None
    if output.HasField("logprobs"):
        logprobs = _integer("input.output.logprobs", output.logprobs, 0, most_logprobs)
    if output.HasField("prompt_logprobs"):
        prompt_logprobs = _integer("input.output.prompt_logprobs", output.prompt_logprobs, 0, most_logprobs)
    detokenize = output.detokenize if output.HasField("detokenize") else True
    if output.echo and not detokenize:
        raise InvalidArgument("it needs text, and output.detokenize is false", field_path="input.output.echo")
    stop_strings = check_stop_strings(stopping, config, detokenize)
    stop_ids = _ids("input.stopping.stop_token_ids", stopping.stop_token_ids, config.max_stop_token_ids, bounds)
    min_tokens, max_tokens = check_token_limits(
        stopping, bounds.max_model_len, output.echo or prompt_logprobs is not None
    )
    _check_priority(request.priority, bounds)
    _check_cache_salt(request.cache_salt)
    ending_ids = frozenset(stop_ids if stopping.ignore_eos else (*stop_ids, *bounds.eos_ids))
    constraint = read_constraint(request.constraint) if request.HasField("constraint") else None
    if constraint is not None:
        check_ending(constraint, stopping, sampling, bounds.eos_ids)
    if beams is None:
        row = _row_sampling(sampling, bounds, min_tokens, ending_ids, -1 if logprobs is None else logprobs)
    else:
        # The likeliest ids of each row are all that matters; what must not end yet is left out where they are chosen.
        candidates = num_candidates(beams, len(ending_ids))
        row = RowSampling(seed=0, temperature=0.0, min_tokens=min_tokens, logprobs=candidates)
    return GenerationParams(
        num_choices=num_choices,
        sampling=msgspec.structs.replace(row, prompt_logprobs=-1 if prompt_logprobs is None else prompt_logprobs),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ending_ids=ending_ids,
        caller_stop_ids=frozenset(stop_ids),
        stop_strings=stop_strings,
        include_stop_string=stopping.include_stop_string,
        logprobs=logprobs,
        token_ids=output.token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        detokenize=detokenize,
        priority=request.priority,
        cache_salt=request.cache_salt,
        time_limit_s=check_time_limit(stopping),
        constraint=constraint,
        prompt_logprobs=prompt_logprobs,
        echo=output.echo,
        beams=beams,
    )


def check_prompt_form(request: pb.GenerationInput, bounds: Bounds, max_prompt_bytes: int) -> None:
    """Check what can be told of a prompt before it is tokenised.

    Raises:
        InvalidArgument: no prompt, an empty one, one with NUL, or more text than can fit.
        ContextLengthExceeded: more ids than fit.
    """
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidArgument("one of text, token_ids and chat must be set", field_path="input.prompt")
    if form == "token_ids":
        if not request.token_ids.ids:
            raise InvalidArgument("at least one token is needed", field_path="input.token_ids.ids")
        check_prompt_length(len(request.token_ids.ids), bounds, "input.token_ids")
        return
    if form == "text":
        if not request.text:
            raise InvalidArgument("the prompt is empty", field_path="input.text")
        num_bytes = len(request.text.encode())
        _refuse_nul(request.text, "input.text")
    else:
        messages, max_messages = request.chat.messages, bounds.config.max_messages
        if not messages:
            raise InvalidArgument("at least one message is needed", field_path="input.chat.messages")
        if len(messages) > max_messages:
            raise InvalidArgument(f"{len(messages)} messages, limit {max_messages}", field_path="input.chat.messages")
        num_bytes = sum(len(m.content.encode()) + len(m.role) + len(m.name) for m in messages)
        num_bytes += num_tool_bytes(request.chat)
        for i, one in enumerate(messages):
            for name in ("role", "content", "name"):
                _refuse_nul(getattr(one, name), f"input.chat.messages[{i}].{name}")
        for i, tool in enumerate(request.chat.tools):
            _refuse_nul(tool.description, f"input.chat.tools[{i}].description")
    if num_bytes > max_prompt_bytes:
        message = (
            f"{num_bytes} bytes of text, limit {max_prompt_bytes} (max_model_len is {bounds.max_model_len} tokens)"
        )
        raise ContextLengthExceeded(message, field_path=f"input.{form}")


def check_token_ids(ids: Sequence[int], bounds: Bounds) -> None:
    """Check a prompt of ids.

    Raises:
        InvalidArgument: an id lies outside the vocabulary.
    """
    if max(ids) >= bounds.vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= bounds.vocab_size)
        _refuse_id(f"input.token_ids.ids[{index}]", ids[index], bounds)


def resolve_call(params: GenerationParams, form: str, prompt_ids: Sequence[int], bounds: Bounds) -> GenerationCall:
    """Put parameters and the tokenised prompt together.

    Args:
        params: what `check_params` returned.
        form: of the prompt: text, token_ids or chat.
        prompt_ids: the prompt, ids within the vocabulary.
        bounds: limits.

    Raises:
        InvalidArgument: the prompt holds no token.
        ContextLengthExceeded: the prompt, or prompt and max_tokens, do not fit; names all numbers.
    """
    num_prompt_tokens = len(prompt_ids)
    check_prompt_length(num_prompt_tokens, bounds, f"input.{form}")
    room = bounds.max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"prompt of {num_prompt_tokens} tokens and max_tokens {max_tokens} exceed the limit of "
            f"{bounds.max_model_len} tokens (max_model_len)",
            field_path="input.stopping.max_tokens",
            metadata={
                "prompt_tokens": str(num_prompt_tokens),
                "max_tokens": str(max_tokens),
                "max_model_len": str(bounds.max_model_len),
            },
        )
    if params.min_tokens > max_tokens:
        message = f"{params.min_tokens}, limit {max_tokens} (what the context leaves for the output)"
        raise InvalidArgument(message, field_path="input.stopping.min_tokens")
    return GenerationCall(params, pack_ints(prompt_ids), num_prompt_tokens, max_tokens)


def check_prompt_length(num_tokens: int, bounds: Bounds, path: str) -> None:
    """Check a prompt's number of tokens.

    Raises:
        InvalidArgument: there is none.
        ContextLengthExceeded: they leave no room for a token of output.
    """
    if not num_tokens:
        raise InvalidArgument("the prompt holds no token", field_path=path)
    if num_tokens >= bounds.max_model_len:
        raise ContextLengthExceeded(
            f"prompt of {num_tokens} tokens, limit {bounds.max_model_len} (max_model_len, with at least one token of "
            "output)",
            field_path=path,
            metadata={"prompt_tokens": str(num_tokens), "max_model_len": str(bounds.max_model_len)},
        )


def _refuse_nul(text: str, path: str) -> None:
    """Refuse U+0000: in text it is a mistake, and some tokenizers end there."""
    if (place := text.find("\0")) >= 0:
        raise InvalidArgument(f"character {place} is NUL (U+0000), which no text holds", field_path=path)


def _row_sampling(
    sampling: pb.SamplingParams, bounds: Bounds, min_tokens: int, ending_ids: frozenset[int], logprobs: int
) -> RowSampling:
    path, defaults = "input.sampling", bounds.defaults
    temperature = _number(sampling, "temperature", defaults.temperature, 0.0, MAX_TEMPERATURE)
    top_k = sampling.top_k if sampling.HasField("top_k") else defaults.top_k
    _integer(f"{path}.top_k", top_k, -1, INT32_MAX)
    bias_ids, bias_values = _logit_bias(sampling, bounds)
    allowed = _ids(f"{path}.allowed_token_ids", sampling.allowed_token_ids, bounds.config.max_allowed_token_ids, bounds)
    if allowed and min_tokens and ending_ids.issuperset(allowed):
        raise InvalidArgument(
            f"all {len(allowed)} allowed ids end the output, which min_tokens = {min_tokens} forbids: nothing could be drawn",
            field_path=f"{path}.allowed_token_ids",
        )
    return RowSampling(
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=_number(sampling, "top_p", defaults.top_p, 0.0, 1.0, low_excluded=True),
        top_k=top_k if 0 < top_k < bounds.vocab_size else 0,
        min_p=_number(sampling, "min_p", defaults.min_p, 0.0, 1.0),
        presence_penalty=_number(sampling, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(sampling, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_number(
            sampling, "repetition_penalty", defaults.repetition_penalty, MIN_REPETITION_PENALTY, 10.0
        ),
        min_tokens=min_tokens,
        stop_token_ids=pack_ints(sorted(ending_ids)) if min_tokens else b"",
        logit_bias_ids=pack_ints(bias_ids),
        logit_bias_values=pack_floats(bias_values),
        allowed_token_ids=pack_ints(allowed),
        logprobs=logprobs,
    )


def _logit_bias(sampling: pb.SamplingParams, bounds: Bounds) -> tuple[list[int], list[float]]:
    path, limit = "input.sampling.logit_bias", bounds.config.max_logit_bias
    if len(sampling.logit_bias) > limit:
        raise InvalidArgument(f"{len(sampling.logit_bias)} entries, limit {limit}", field_path=path)
    entries = sorted(sampling.logit_bias.items())
    for token_id, value in entries:
        if token_id >= bounds.vocab_size:
            _refuse_id(f"{path}[{token_id}]", token_id, bounds)
        if not -100.0 <= value <= 100.0:
            message = f"{value:g} must be a finite number from -100 to 100"
            raise InvalidArgument(message, field_path=f"{path}[{token_id}]")
    return [token_id for token_id, _ in entries], [value for _, value in entries]


def _check_priority(priority: int, bounds: Bounds) -> None:
    if priority and not bounds.takes_priorities:
        message = (
            f"{priority} needs a scheduling policy that takes priorities, as 'priority', this service has "
            f"{bounds.scheduling_policy!r}: only 0 is taken"
        )
        raise InvalidArgument(message, field_path="input.priority")


def _check_cache_salt(salt: str) -> None:
    if (num_bytes := len(salt.encode())) > MAX_CACHE_SALT_BYTES:
        raise InvalidArgument(f"{num_bytes} bytes, limit {MAX_CACHE_SALT_BYTES}", field_path="input.cache_salt")


def _ids(path: str, ids: Sequence[int], limit: int, bounds: Bounds) -> list[int]:
    if len(ids) > limit:
        raise InvalidArgument(f"{len(ids)} entries, limit {limit}", field_path=path)
    for i, token_id in enumerate(ids):
        if token_id >= bounds.vocab_size:
            _refuse_id(f"{path}[{i}]", token_id, bounds)
    return sorted(set(ids))


def _refuse_id(path: str, token_id: int, bounds: Bounds) -> None:
    message = f"token id {token_id} lies outside the vocabulary, [0, {bounds.vocab_size})"
    raise InvalidArgument(message, field_path=path)


def _integer(path: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidArgument(f"{value} must be from {low} to {high}", field_path=path)
    return value


def _number(
    message: pb.SamplingParams, name: str, unset: float, low: float, high: float, low_excluded: bool = False
) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]
        return unset
    value: float = getattr(message, name)
    if not math.isfinite(value) or not low <= value <= high or (low_excluded and value == low):
        above = f"above {low:g} and at most {high:g}" if low_excluded else f"from {low:g} to {high:g}"
        raise InvalidArgument(f"{value:g} must be a finite number {above}", field_path=f"input.sampling.{name}")
    return value
