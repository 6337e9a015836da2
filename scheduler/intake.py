"""From an admitted message to a request with its sequences."""

from octavo.scheduler.beams import BeamSearch
from octavo.scheduler.sequence import BeamGroup, Request, Sequence
from octavo.wire.columns import column_length, unpack_ints
from octavo.wire.ids import Handle, SessionId
from octavo.wire.requests import SubmitRequest


class Intake:
    """Numbers requests and sequences in the order in which they come.

    Args:
        enable_prefix_caching: whether keys of the prefix cache are heeded.
    """

    def __init__(self, enable_prefix_caching: bool) -> None:
        self._enable_prefix_caching = enable_prefix_caching
        self._num_requests = self._num_sequences = 0

    def make_request(self, frontend: SessionId, message: SubmitRequest, now: float, owner: str = "") -> Request:
        """Return a request with its sequences, each with the output that a replay brings."""
        self._num_requests += 1
        request = Request(
            frontend=frontend,
            handle=Handle(message.handle),
            arrival=self._num_requests,
            prompt_ids=message.prompt_ids,
            num_prompt_tokens=column_length(message.prompt_ids),
            max_output_tokens=message.max_tokens,
            sampling=message.sampling,
            stop_ids=frozenset(unpack_ints(message.stop_token_ids)),
            submitted_at=now,
            deadline=float("inf") if message.deadline_s is None else now + message.deadline_s,
            is_replay=bool(message.output_ids),
            owner=owner,
            caller=message.caller,
            priority=message.priority,
            grammar=message.grammar,
            trace=message.trace,
            num_prompt_told=max(1, message.num_prompt_told),
            num_choices=message.num_choices,
        )
        if self._enable_prefix_caching:
            request.prefix_root, request.prefix_keys = message.prefix_root, message.prefix_keys
        outputs = message.output_ids or (b"",) * message.num_choices
        if (beams := message.beams) is not None:
            search = BeamSearch(beams, message.max_tokens, message.sampling.min_tokens, request.stop_ids)
            request.group = BeamGroup(search)
            outputs = (b"",) * beams.width
        request.sequences = [self._make_sequence(request, i, output) for i, output in enumerate(outputs)]
        return request

    def _make_sequence(self, request: Request, choice: int, output: bytes) -> Sequence:
        self._num_sequences += 1
        output_ids = list(unpack_ints(output))
        num_known = request.num_prompt_tokens + len(output_ids)
        return Sequence(
            request,
            choice,
            self._num_sequences,
            output_ids,
            num_known,
            num_expected=num_known,
            num_prompt=request.num_prompt_tokens,
            plan_limit=num_known if request.group else request.num_prompt_tokens + request.max_output_tokens - 1,
            handle=request.handle,
            frontend=request.frontend,
            stop_ids=request.stop_ids,
            # All but the last token of the output were computed once, or there would be no output.
            num_furthest=num_known - 1 if output_ids else 0,
        )
