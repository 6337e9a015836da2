"""What is known of one request, enough to begin it again at a scheduler that knows nothing of it."""

from array import array

from octavo.frontend.prompt_logprobs import ToldPrompt
from octavo.frontend.validation import GenerationCall
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import ServiceFacts
from octavo.wire.prefix import prompt_keys, root_key
from octavo.wire.requests import SubmitRequest


class Journal:
    """A request and every id received for it.

    The law: `outputs[i]` holds choice i's ids from position 0 without a gap, in the order received; ids of a finished
    choice never change. `prompt` holds what has been told of the prompt, if that is wanted. Only the request's `Stream`
    writes here.

    Args:
        call: prompt, parameters and seed.
        model_digest: identity of the model; with tenant and the call's salt it says what of the prefix cache can be
            found.
        caller: whom the request counts against.
        tenant: with whose requests alone this one shares its prefixes, '' for all that have none.
        grammar: what each choice must be, compiled; empty: anything.
        request_id: the caller's name for the call, for logs.
    """

    def __init__(
        self,
        call: GenerationCall,
        model_digest: str,
        caller: str = "",
        tenant: str = "",
        grammar: bytes = b"",
        request_id: str = "",
    ) -> None:
        self.call = call
        self.outputs = [array("i") for _ in range(call.params.num_choices)]
        self.finished: set[int] = set()
        num_top = call.params.prompt_logprobs
        self.prompt = None if num_top is None else ToldPrompt(call.num_prompt_tokens, num_top)
        self._prefix_root = root_key(model_digest, tenant, call.params.cache_salt)
        self._prefix_keys = b""
        self._keyed_block_size = 0  # of _prefix_keys; 0: there are none yet
        self._caller = caller
        self._request_id = request_id
        self.grammar = grammar  # may be set until the request begins
        self.trace = ""  # traceparent of the span that tells of it; likewise
        self.is_started = False  # a plan has named it: from then on it must not be refused for load, replayed or not

    def forget_output(self) -> None:
        """Forget all ids: what a search finds comes whole."""
        for ids in self.outputs:
            del ids[:]
        self.finished.clear()

    @property
    def num_completion_tokens(self) -> int:
        """Number of ids received, of all choices."""
        return sum(len(ids) for ids in self.outputs)

    def hash_prompt(self, facts: ServiceFacts) -> None:
        """Compute the prompt's keys for the prefix cache, if they are wanted and not there yet.

        It takes about a microsecond a block: a long prompt is hashed where it is tokenised, off the event loop.
        """
        if facts.prefix_caching and self._keyed_block_size != facts.block_size:
            self._prefix_keys = prompt_keys(self._prefix_root, self.call.prompt_ids, facts.block_size)
            self._keyed_block_size = facts.block_size

    def to_request(self, handle: int, deadline_s: float | None, facts: ServiceFacts) -> SubmitRequest:
        """Return the message that begins the request, or goes on with it.

        A request that has been taken up under another policy goes on under this one: its priority is left out where it
        would be refused.

        Args:
            handle: the request's number in this frontend.
            deadline_s: seconds that are left.
            facts: of the session in which it is sent.
        """
        self.hash_prompt(facts)
        call = self.call
        return SubmitRequest(
            handle=handle,
            prompt_ids=call.prompt_ids,
            num_choices=call.params.num_choices,
            max_tokens=call.max_tokens,
            sampling=call.params.sampling,
            stop_token_ids=pack_ints(sorted(call.params.ending_ids)),
            output_ids=tuple(pack_ints(ids) for ids in self.outputs) if self.is_started else (),
            finished_choices=pack_ints(sorted(self.finished)),
            deadline_s=deadline_s,
            caller=self._caller,
            trace=self.trace,
            priority=call.params.priority if facts.takes_priorities else 0,
            prefix_root=self._prefix_root if facts.prefix_caching else b"",
            prefix_keys=self._prefix_keys if facts.prefix_caching else b"",
            grammar=self.grammar,
            num_prompt_told=self.prompt.num_told if self.prompt is not None else 0,
            beams=call.params.beams,
            request_id=self._request_id,
        )
