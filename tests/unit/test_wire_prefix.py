"""Keys of the prefix cache: known answers, what they tell apart, and the form in which a request brings them."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.wire.columns import pack_ints
from octavo.wire.errors import MalformedMessage
from octavo.wire.prefix import KEY_BYTES, block_key, check_keys, prompt_keys, root_key

ROOT = bytes(range(KEY_BYTES))
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
parts = st.tuples(*[st.text(max_size=3)] * 4)


def test_the_root_is_the_digest_of_its_parts_with_their_lengths() -> None:
    lengths = [n.to_bytes(8, "little") for n in (4, 3, 2, 0)]
    content = b"octavo prefix cache 1" + lengths[0] + b"0xab" + lengths[1] + b"bob" + lengths[2] + "é".encode()
    assert root_key("0xab", "bob", "é") == sha256(content + lengths[3]).digest()


def test_keys_are_known_for_ever() -> None:
    # Written down once: a change would make peers of two versions share nothing, or the wrong thing.
    root = root_key("model", "tenant", "salt", "adapter")
    assert root.hex() == "c2d440033e57a46e52bf315aca09f6709a9729d7dbd2b43d4ed87d95c403f12f"
    assert (
        block_key(root, pack_ints([1, 2, 3, 4])).hex()
        == "47b4338f3fc2e0d6eeec3848b45b6c9273a29200ee8edd43cf2ad18ed9fea852"
    )


def test_the_key_of_a_block_is_the_digest_of_parent_and_little_endian_ids() -> None:
    assert block_key(ROOT, pack_ints([1, 258])) == sha256(ROOT + b"\x01\0\0\0\x02\x01\0\0").digest()


def test_a_prompt_has_a_key_for_each_full_block() -> None:
    prompt = [9, 8, 7, 6, 5]
    first = sha256(ROOT + pack_ints([9, 8])).digest()
    second = sha256(first + pack_ints([7, 6])).digest()
    assert prompt_keys(ROOT, pack_ints(prompt), 2) == first + second
    assert prompt_keys(ROOT, pack_ints(prompt[:4]), 2) == first + second
    assert prompt_keys(ROOT, pack_ints(prompt[:3]), 2) == first
    assert prompt_keys(ROOT, pack_ints(prompt[:1]), 2) == b""
    assert prompt_keys(ROOT, b"", 2) == b""


@given(ids, ids, st.integers(1, 5))
def test_prompts_share_the_keys_of_the_blocks_they_share(left: list[int], right: list[int], size: int) -> None:
    num_equal = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(map(len, (left, right)))
    )
    keys = [prompt_keys(ROOT, pack_ints(prompt), size) for prompt in (left, right)]
    split = [[found[i : i + KEY_BYTES] for i in range(0, len(found), KEY_BYTES)] for found in keys]
    assert [len(found) for found in split] == [len(left) // size, len(right) // size]
    num_shared = num_equal // size
    assert split[0][:num_shared] == split[1][:num_shared]
    assert not set(split[0][num_shared:]) & set(split[1][num_shared:])


def test_keys_depend_on_all_that_came_before() -> None:
    same_end = [prompt_keys(ROOT, pack_ints([first, 5, 6, 7]), 2)[KEY_BYTES:] for first in (1, 2)]
    assert same_end[0] != same_end[1]
    other_root = prompt_keys(root_key("other"), pack_ints([1, 5]), 2)
    assert other_root != prompt_keys(ROOT, pack_ints([1, 5]), 2)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("m", "ab", "c"), ("m", "a", "bc")),
        (("m", "ab", ""), ("m", "", "ab")),
        (("m", "", "", "ab"), ("m", "", "ab", "")),
        (("ma", "b"), ("m", "ab")),
        (("m", "a\0", "b"), ("m", "a", "\0b")),
        (("m", "\x01\0\0\0\0\0\0\0a"), ("m", "", "\x01\0\0\0\0\0\0\0a")),
    ],
)
def test_parts_cannot_be_cut_elsewhere(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    assert root_key(*left) != root_key(*right)


@given(parts, parts)
def test_roots_are_equal_only_for_equal_parts(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    assert (root_key(*left) == root_key(*right)) == (left == right)


@pytest.mark.parametrize(
    ("root", "keys"), [(b"", b""), (ROOT, b""), (ROOT, ROOT), (ROOT, ROOT * 3)], ids=["none", "root", "one", "three"]
)
def test_well_formed_keys_pass(root: bytes, keys: bytes) -> None:
    check_keys(root, keys)


@pytest.mark.parametrize(
    ("root", "keys", "words"),
    [
        (ROOT[1:], b"", "prefix root of 31 bytes and keys of 0: keys have 32 each"),
        (ROOT + b"x", b"", "prefix root of 33 bytes and keys of 0"),
        (ROOT, ROOT[1:], "prefix root of 32 bytes and keys of 31"),
        (ROOT, ROOT + b"x", "prefix root of 32 bytes and keys of 33"),
        (b"", ROOT, "prefix root of 0 bytes and keys of 32"),
    ],
)
def test_malformed_keys_are_refused(root: bytes, keys: bytes, words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        check_keys(root, keys)
