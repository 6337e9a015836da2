"""Keys of the prefix cache: which blocks hold the keys and values of the same tokens for the same tenant.

The key of a full block is SHA-256 over the key of the block before it and the block's ids, as little-endian int32. So
equal keys mean equal tokens from position 0 on, under one root; roots differ by model, adapter, tenant and salt, and
nobody can reach a block of a tenant whose salt they do not have.
"""

from hashlib import sha256

from octavo.wire.errors import MalformedMessage

KEY_BYTES = 32

_DOMAIN = b"octavo prefix cache 1"


def root_key(model_digest: str, tenant: str = "", cache_salt: str = "", adapter: str = "") -> bytes:
    """Return the parent of all first blocks that may be shared.

    Args:
        model_digest: `model_digest()` of the model folder.
        tenant: the caller's authenticated identity, never from the request itself.
        cache_salt: what the request adds to it.
        adapter: name of the adapter, '' for none.
    """
    digest = sha256(_DOMAIN)
    for part in (model_digest, tenant, cache_salt, adapter):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))  # so that no two lists of parts make the same bytes
        digest.update(encoded)
    return digest.digest()


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Return the key of the block that holds `ids` (a column of int32) after the block with key `parent`."""
    return sha256(parent + ids).digest()


def prompt_keys(root: bytes, prompt_ids: bytes, block_size: int) -> bytes:
    """Return the keys of a prompt's full blocks, one after the other.

    Args:
        root: `root_key()`.
        prompt_ids: column of int32.
        block_size: tokens in a block.
    """
    size = 4 * block_size
    keys: list[bytes] = []
    parent = root
    for begin in range(0, len(prompt_ids) - size + 1, size):
        parent = block_key(parent, prompt_ids[begin : begin + size])
        keys.append(parent)
    return b"".join(keys)


def split_keys(keys: bytes) -> list[bytes]:
    """Return keys that stand one after the other as a list."""
    return [keys[begin : begin + KEY_BYTES] for begin in range(0, len(keys), KEY_BYTES)]


def check_keys(root: bytes, keys: bytes) -> None:
    """Check the form of a request's keys; no root and no keys: it takes no part in the cache.

    Raises:
        MalformedMessage: a length is wrong, or there are keys without a root.
    """
    if len(root) not in (0, KEY_BYTES) or len(keys) % KEY_BYTES or (keys and not root):
        raise MalformedMessage(f"prefix root of {len(root)} bytes and keys of {len(keys)}: keys have {KEY_BYTES} each")
