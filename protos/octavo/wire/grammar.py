"""Compiled grammars on their way from a frontend, which has them compiled, to the worker, which matches ids with them.

xgrammar's native objects are used without its Python layer: that imports torch and transformers, which takes seconds
and 300 MB, while its library alone is there in a tenth of a second. `load_core` is the one place that knows how.
"""

import importlib.util
import os
import sys
import zlib
from types import ModuleType
from typing import Any

import msgspec

from octavo.wire.errors import MalformedMessage

MAX_BODY_BYTES = 4 * 2**20
"""Largest grammar that travels, packed."""

MAX_COMPILED_BYTES = 32 * 2**20
"""Largest grammar, unpacked."""

_PACK_LEVEL = 1
_RAW_BYTES = 0
"""xgrammar's name for a vocabulary of plain bytes."""


class GrammarBody(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of `SubmitRequest.grammar` and `NewRow.grammar` hold: nobody between the two ends looks into it."""

    stop_ids: tuple[int, ...]  # that may be drawn where the text is complete, and end it
    packed: bytes  # zlib: xgrammar's own serialisation


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GrammarBody)


def pack(compiled: str, stop_ids: tuple[int, ...]) -> bytes:
    """Return a compiled grammar as the bytes that travel."""
    return _encoder.encode(GrammarBody(stop_ids, zlib.compress(compiled.encode(), _PACK_LEVEL)))


def unpack(body: bytes) -> tuple[str, tuple[int, ...]]:
    """Return a compiled grammar in xgrammar's serialisation, and its stop ids.

    Raises:
        MalformedMessage: the bytes are no grammar, or too many.
    """
    try:
        decoded = _decoder.decode(body)
        inflater = zlib.decompressobj()
        data = inflater.decompress(decoded.packed, MAX_COMPILED_BYTES)
        if not inflater.eof:
            raise MalformedMessage(f"a grammar of more than {MAX_COMPILED_BYTES} bytes, or cut off")
        return data.decode(), decoded.stop_ids
    except (msgspec.DecodeError, zlib.error, UnicodeDecodeError) as error:
        raise MalformedMessage(f"no grammar: {error}") from error


def load_core() -> Any:
    """Return xgrammar's native classes.

    Raises:
        ImportError: xgrammar is not installed.
    """
    # Where torch is there, tvm_ffi would compile an extension for it, which nobody here uses.
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    if "xgrammar" not in sys.modules:
        spec = importlib.util.find_spec("xgrammar")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("xgrammar is not installed")
        package = ModuleType("xgrammar")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["xgrammar"] = package
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.tvm_ffi_binding._ffi_api")


def tokenizer_info(core: Any, token_bytes: list[bytes], stop_ids: tuple[int, ...]) -> Any:
    """Return what xgrammar must know of a model's tokenizer; the same on both ends.

    Args:
        core: `load_core()`.
        token_bytes: of each id (vocabulary.py).
        stop_ids: ends of sequence, which are no text, whatever their bytes.
    """
    hidden = frozenset(stop_ids)
    vocabulary = [b"" if token_id in hidden else data for token_id, data in enumerate(token_bytes)]
    return core.TokenizerInfo(vocabulary, _RAW_BYTES, len(vocabulary), list(stop_ids), False)
