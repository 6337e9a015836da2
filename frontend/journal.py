"""What is known of one request, enough to begin it again at a scheduler that knows nothing of it."""

from array import array

from octavo.frontend.validation import GenerationCall
from octavo.wire.columns import pack_ints
from octavo.wire.requests import SubmitRequest


class Journal:
    """A request and every id received for it.

    The law: `outputs[i]` holds choice i's ids from position 0 without a gap, in the order received; ids of a finished
    choice never change. Only the request's `Stream` writes here.

    Args:
        call: prompt, parameters and seed.
        caller: whom the request counts against.
        trace: traceparent, for logs.
    """

    def __init__(self, call: GenerationCall, caller: str = "", trace: str = "") -> None:
        self.call = call
        self.outputs = [array("i") for _ in range(call.params.num_choices)]
        self.finished: set[int] = set()
        self._caller = caller
        self._trace = trace

    @property
    def num_completion_tokens(self) -> int:
        """Number of ids received, of all choices."""
        return sum(len(ids) for ids in self.outputs)

    def to_request(self, handle: int, deadline_s: float | None) -> SubmitRequest:
        """Return the message that begins the request, or goes on with it.

        Args:
            handle: the request's number in this frontend.
            deadline_s: seconds that are left.
        """
        call = self.call
        is_replay = any(self.outputs) or bool(self.finished)
        return SubmitRequest(
            handle=handle,
            prompt_ids=call.prompt_ids,
            num_choices=call.params.num_choices,
            max_tokens=call.max_tokens,
            sampling=call.params.sampling,
            stop_token_ids=pack_ints(sorted(call.params.ending_ids)),
            output_ids=tuple(pack_ints(ids) for ids in self.outputs) if is_replay else (),
            finished_choices=pack_ints(sorted(self.finished)),
            deadline_s=deadline_s,
            caller=self._caller,
            trace=self._trace,
        )
