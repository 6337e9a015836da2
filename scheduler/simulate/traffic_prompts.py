"""Messages for simulated requests: cheap ones, whose ids mean nothing, or exact ones, whose ids can be checked."""

from random import Random

from octavo.scheduler.simulate.arrivals import Arrival
from octavo.wire.columns import pack_ints
from octavo.wire.plan import RowSampling
from octavo.wire.prefix import KEY_BYTES, prompt_keys, root_key
from octavo.wire.requests import SubmitRequest

STOP_ID = 0
"""What ends a choice whose caller allowed more; it stands in no prompt that is made here."""

_ROOT = root_key("simulated")
_HALF_KEY = KEY_BYTES // 2


class Prompts:
    """Makes the message of an arrival.

    Args:
        vocab_size: at least 2.
        block_size: of the worker, for the keys of the prefix cache.
        exact: make distinct ids and hash them, as a frontend does. Otherwise ids are filler, and a key is the name of
            a group or request and the number of a block, which are equal exactly where hashes of distinct ids would be.
    """

    def __init__(self, vocab_size: int, block_size: int, *, exact: bool) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._exact = exact
        self._filler = b""
        self._numbers: list[bytes] = []  # second halves of keys, by number of the block
        self._groups: dict[str, int] = {}
        self._sampling = RowSampling(seed=0, temperature=0.0)
        self._stop_column = pack_ints([STOP_ID])

    def message(self, handle: int, arrival: Arrival, priority: int) -> SubmitRequest:
        """Return the message that a frontend would send."""
        if self._exact or arrival.prompt_ids:
            ids = pack_ints(arrival.prompt_ids or self._random_ids(handle, arrival))
            keys = prompt_keys(_ROOT, ids, self._block_size)
        else:
            ids, keys = self._filler_ids(handle, arrival), self._made_up_keys(handle, arrival)
        return SubmitRequest(
            handle=handle,
            prompt_ids=ids,
            num_choices=arrival.num_choices,
            max_tokens=arrival.max_tokens,
            sampling=RowSampling(seed=handle, temperature=0.0) if self._exact else self._sampling,
            stop_token_ids=self._stop_column if arrival.max_tokens > arrival.num_output_tokens else b"",
            caller=arrival.caller,
            priority=priority,
            prefix_root=_ROOT,
            prefix_keys=keys,
        )

    def _random_ids(self, handle: int, arrival: Arrival) -> list[int]:
        num_shared = arrival.num_prefix_tokens if arrival.prefix_group else 0
        shared = Random(f"group {arrival.prefix_group}").choices(range(1, self._vocab_size), k=num_shared)  # noqa: S311
        num_own = arrival.num_prompt_tokens - num_shared
        return shared + Random(f"own {handle}").choices(range(1, self._vocab_size), k=num_own)  # noqa: S311

    def _filler_ids(self, handle: int, arrival: Arrival) -> bytes:
        size = 4 * arrival.num_prompt_tokens
        if size > len(self._filler):
            self._filler = pack_ints([1]) * (2 * arrival.num_prompt_tokens)
        # The last id tells requests apart: the first hashed block of a short prompt is chained on nothing else.
        return self._filler[: size - 4] + pack_ints([1 + handle % (self._vocab_size - 1)])

    def _made_up_keys(self, handle: int, arrival: Arrival) -> bytes:
        num_blocks = arrival.num_prompt_tokens // self._block_size
        num_shared = 0
        while len(self._numbers) < num_blocks:
            self._numbers.append(len(self._numbers).to_bytes(_HALF_KEY, "little"))
        keys: list[bytes] = []
        if arrival.prefix_group:
            num_shared = arrival.num_prefix_tokens // self._block_size
            group = self._groups.setdefault(arrival.prefix_group, len(self._groups))
            name = b"G" + group.to_bytes(_HALF_KEY - 1, "little")
            keys = [name + number for number in self._numbers[:num_shared]]
        name = b"R" + handle.to_bytes(_HALF_KEY - 1, "little")
        keys += [name + number for number in self._numbers[num_shared:num_blocks]]
        return b"".join(keys)
