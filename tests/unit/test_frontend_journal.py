"""What a journal tells the scheduler about the prefix cache and priorities, in this session and the next."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format

from octavo.frontend import journal as journal_module
from octavo.frontend.config import FrontendConfig
from octavo.frontend.generation_config import SamplingDefaults
from octavo.frontend.journal import Journal
from octavo.frontend.validation import Bounds, check_params, resolve_call
from octavo.v1 import generation_pb2 as pb
from octavo.wire.columns import pack_ints
from octavo.wire.handshake import ServiceFacts
from octavo.wire.prefix import KEY_BYTES, block_key, prompt_keys, root_key

CONFIG = FrontendConfig(model_path=Path("model"), served_model_names=("tiny",), address="ipc:///nowhere")
BOUNDS = Bounds(CONFIG, 300, 256, SamplingDefaults(), (256,), "priority", takes_priorities=True)
FACTS = ServiceFacts(300, 256, 16, 8, "priority", prefix_caching=True, takes_priorities=True)
PROMPT = list(range(40))


def make_journal(**fields: Any) -> Journal:
    params = check_params(json_format.ParseDict(fields, pb.GenerationInput()), BOUNDS)
    return Journal(resolve_call(params, "text", PROMPT, BOUNDS), "digest", "ipv4:127.0.0.1")


def test_full_blocks_have_keys_under_the_root_of_model_and_salt() -> None:
    request = make_journal(cacheSalt="pepper").to_request(1, None, FACTS)
    root = root_key("digest", cache_salt="pepper")
    assert request.prefix_root == root
    first = block_key(root, pack_ints(PROMPT[:16]))
    assert request.prefix_keys == first + block_key(first, pack_ints(PROMPT[16:32]))
    assert request.caller == "ipv4:127.0.0.1"


def test_the_caller_shares_with_all_who_have_the_same_salt() -> None:
    plain, salted = make_journal(), make_journal(cacheSalt="pepper")
    other = Journal(plain.call, "digest", "ipv4:10.0.0.1")
    keys = [journal.to_request(1, None, FACTS).prefix_keys for journal in (plain, other, salted)]
    assert keys[0] == keys[1]
    assert keys[0][:KEY_BYTES] != keys[2][:KEY_BYTES]
    assert Journal(plain.call, "another").to_request(1, None, FACTS).prefix_root != root_key("digest")


def test_nothing_is_hashed_where_prefixes_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(journal_module, "prompt_keys")
    journal = make_journal(cacheSalt="pepper")
    facts = msgspec.structs.replace(FACTS, prefix_caching=False)
    journal.hash_prompt(facts)
    request = journal.to_request(1, None, facts)
    assert (request.prefix_root, request.prefix_keys) == (b"", b"")


def test_keys_are_computed_once_for_a_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(root: bytes, ids: bytes, block_size: int) -> bytes:
        sizes.append(block_size)
        return prompt_keys(root, ids, block_size)

    monkeypatch.setattr(journal_module, "prompt_keys", counted)
    journal = make_journal()
    journal.hash_prompt(FACTS)
    sent = [journal.to_request(1, None, FACTS) for _ in range(2)]
    assert (sizes, sent[0].prefix_keys) == ([16], sent[1].prefix_keys)
    without = journal.to_request(1, None, msgspec.structs.replace(FACTS, prefix_caching=False))
    assert (without.prefix_root, without.prefix_keys) == (b"", b"")
    smaller = journal.to_request(1, None, msgspec.structs.replace(FACTS, block_size=8))
    assert sizes == [16, 8]
    assert len(smaller.prefix_keys) == 5 * KEY_BYTES
    assert smaller.prefix_keys == prompt_keys(root_key("digest"), pack_ints(PROMPT), 8)


def test_a_prompt_shorter_than_a_block_has_a_root_and_no_keys() -> None:
    request = make_journal().to_request(1, None, msgspec.structs.replace(FACTS, block_size=64))
    assert (request.prefix_root, request.prefix_keys) == (root_key("digest"), b"")


@pytest.mark.parametrize(
    ("policy", "taken"), [("priority", True), ("one's own", True), ("fcfs", False), ("fair", False)]
)
def test_a_priority_is_told_only_where_it_is_taken(policy: str, taken: bool) -> None:
    """A stream goes on when the next scheduler has another policy."""
    facts = msgspec.structs.replace(FACTS, scheduling_policy=policy, takes_priorities=taken)
    assert make_journal(priority=-7).to_request(1, None, facts).priority == (-7 if taken else 0)


def test_what_has_started_goes_on_even_if_no_id_has_come() -> None:
    """The next scheduler must not refuse it for load: its caller has been told that it started."""
    journal = make_journal(sampling={"n": 2})
    assert [journal.to_request(handle, None, FACTS).output_ids for handle in (1, 2)] == [(), ()]
    journal.is_started = True
    assert journal.to_request(3, None, FACTS).output_ids == (b"", b"")
