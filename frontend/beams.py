"""Checks of a BeamSearch: what it may ask for, and that nothing beside it shapes a draw."""

import math
from collections.abc import Callable, Mapping

from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import InvalidArgument
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import MAX_LENGTH_PENALTY, BeamParams

_PATH = "input.sampling.beam_search"

_EXCLUDED: Mapping[str, Callable[[pb.GenerationInput], bool]] = {
    "input.sampling.temperature": lambda one: one.sampling.temperature > 0,
    "input.sampling.top_p": lambda one: one.sampling.HasField("top_p") and one.sampling.top_p != 1,
    "input.sampling.top_k": lambda one: one.sampling.top_k not in (0, -1),
    "input.sampling.min_p": lambda one: one.sampling.min_p != 0,
    "input.sampling.presence_penalty": lambda one: one.sampling.presence_penalty != 0,
    "input.sampling.frequency_penalty": lambda one: one.sampling.frequency_penalty != 0,
    "input.sampling.repetition_penalty": lambda one: (
        one.sampling.HasField("repetition_penalty") and one.sampling.repetition_penalty != 1
    ),
    "input.sampling.logit_bias": lambda one: bool(one.sampling.logit_bias),
    "input.sampling.allowed_token_ids": lambda one: bool(one.sampling.allowed_token_ids),
    "input.sampling.bad_words": lambda one: bool(one.sampling.bad_words),
    "input.stopping.stop_strings": lambda one: bool(one.stopping.stop_strings),
    "input.constraint": lambda one: one.HasField("constraint"),
    "input.stopping.max_tokens": lambda one: one.stopping.HasField("max_tokens") and one.stopping.max_tokens == 0,
    "input.output.logprobs": lambda one: one.output.HasField("logprobs"),
}


def check_beams(request: pb.GenerationInput, num_choices: int, config: FrontendConfig) -> BeamParams | None:
    """Return what is searched for, None if tokens are drawn.

    The model's own defaults of what shapes a draw do not count; only what the request sets is refused.

    Raises:
        InvalidArgument: the width or the penalty is out of its range, or the request asks for something that a search
            excludes.
    """
    if not request.sampling.HasField("beam_search"):
        return None
    asked = request.sampling.beam_search
    if not 1 <= asked.width <= config.max_beam_width:
        raise InvalidArgument(f"{asked.width} must be from 1 to {config.max_beam_width}", field_path=f"{_PATH}.width")
    if num_choices > asked.width:
        message = f"{num_choices} of a search, limit {asked.width} (beam_search.width)"
        raise InvalidArgument(message, field_path="input.sampling.n")
    penalty = asked.length_penalty if asked.HasField("length_penalty") else 1.0
    if not math.isfinite(penalty) or abs(penalty) > MAX_LENGTH_PENALTY:
        message = f"{penalty:g} must be a finite number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise InvalidArgument(message, field_path=f"{_PATH}.length_penalty")
    for path, asks in _EXCLUDED.items():
        if asks(request):
            raise InvalidArgument("a beam search excludes it", field_path=path)
    return BeamParams(asked.width, penalty, asked.early_stopping)
