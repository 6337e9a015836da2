"""The process that compiles grammars: whatever a request may make of it, it can be killed and started again.

It reads jobs from its standard input and writes what became of each to its standard output, one frame each: four bytes
of length, little-endian, and a msgpack body. It ends with its input. Python -m octavo.frontend.grammar_compiler FOLDER
STOP_IDS, the latter in JSON.
"""

import ctypes
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from octavo.frontend.grammar_jobs import LENGTH, Job, Outcome
from octavo.frontend.grammar_schema import SchemaError, check_schema, parse_json
from octavo.wire.grammar import MAX_BODY_BYTES, MAX_COMPILED_BYTES, load_core, pack, tokenizer_info
from octavo.wire.vocabulary import VocabularyError, read_token_bytes

MEMORY_LIMIT_BYTES = 2 * 2**30
"""That compiling may take beside what the process has when it begins."""

PROBE_TOKENS = 64
PROBE_LIMIT_S = 0.5
UNPACK_LIMIT_S = 0.5
"""CPU time of so many masks, and of unpacking a grammar: more would hold up every request of the worker. Grammars of
everyday size take a hundredth of it; ambiguous ones take longer with every token."""

_LOOSE_CHARACTER, _CHARACTER = r"([^\"\\\r\n])", r"([^\0-\u001f\"\\\r\n])"
"""What xgrammar takes for a character of a string with minLength or maxLength, and what JSON does."""

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)

_PR_SET_PDEATHSIG = 1
_PLACE_IN_SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


class GrammarError(Exception):
    """A constraint that cannot be compiled, or not be held to; the message is for its author."""


class Compiler:
    """xgrammar's compiler for one vocabulary.

    Raises:
        VocabularyError: the tokenizer's ids cannot be turned into bytes one by one.
    """

    def __init__(self, folder: Path, stop_ids: tuple[int, ...]) -> None:
        self._core = load_core()
        self._stop_ids = stop_ids
        self._info = tokenizer_info(self._core, read_token_bytes(folder), stop_ids)
        self._compiler = self._core.GrammarCompiler(self._info, 1, False, -1, False)

    def compile(self, job: Job) -> bytes:
        """Return a grammar as it travels.

        Raises:
            GrammarError: it cannot be compiled, is not enforced whole, or is too large.
        """
        forms: Mapping[str, Callable[[str], Any]] = {
            "json_schema": self._json_schema,
            "json_object": lambda _: self._schema({"type": "object"}),
            "regex": self._regex,
            "grammar": lambda text: self._compiler.compile_grammar_from_strings(text, "root"),
            "choice": self._choice,
            "structural_tag": self._structural_tag,
        }
        try:
            with _warnings() as warnings:
                compiled = forms[job.kind](job.text)
        except SchemaError as error:
            raise GrammarError(str(error)) from error
        except (RuntimeError, ValueError, MemoryError) as error:
            raise GrammarError(_in_short(str(error))) from error
        if warnings:
            raise GrammarError(f"it would not be enforced whole: {_in_short(warnings[0])}")
        text: str = compiled.serialize_json()
        body = pack(text, self._stop_ids)
        if len(text) > MAX_COMPILED_BYTES or len(body) > MAX_BODY_BYTES:
            raise GrammarError(
                f"the compiled grammar has {len(text)} bytes ({len(body)} packed), limit {MAX_COMPILED_BYTES} "
                f"({MAX_BODY_BYTES} packed): make it simpler"
            )
        self._probe(text)
        return body

    def _json_schema(self, text: str) -> Any:
        schema = parse_json(text, "the schema")
        check_schema(schema)
        return self._schema(schema)

    def _schema(self, schema: Any) -> Any:
        # One line, with a space after commas and colons: where white space is free, small models write nothing else.
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        rules = self._core.Grammar.from_json_schema(text, False, None, None, True, None, False, False).to_string()
        if _LOOSE_CHARACTER in rules:
            return self._compile_strictly(rules)
        return self._compiler.compile_json_schema(text, False, None, None, True, None, False)

    def _compile_strictly(self, rules: str) -> Any:
        """Compile rules in whose strings of bounded length control characters stood, which JSON does not allow."""
        # What is printed as \xe7 would take the hexadecimal digits behind it with it when it is read again.
        rules = _ESCAPE.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], rules)
        return self._compiler.compile_grammar_from_strings(rules.replace(_LOOSE_CHARACTER, _CHARACTER), "root")

    def _regex(self, text: str) -> Any:
        if not text:
            raise GrammarError("the regular expression is empty")
        return self._compiler.compile_regex(text)

    def _choice(self, text: str) -> Any:
        choices = json.loads(text)
        return self._compiler.compile_grammar_from_strings("root ::= " + " | ".join(map(_literal, choices)), "root")

    def _structural_tag(self, text: str) -> Any:
        tag = parse_json(text, "the structural tag")
        for schema in _schemas_in(tag, 0):
            check_schema(schema)
        text = json.dumps(tag, ensure_ascii=False, allow_nan=False)
        rules = self._core.Grammar.from_structural_tag(text).to_string()
        if _LOOSE_CHARACTER in rules:
            return self._compile_strictly(rules)
        return self._compiler.compile_structural_tag(text)

    def _probe(self, text: str) -> None:
        """Unpack the grammar and walk through it a little, as a worker would."""
        started = time.process_time()
        compiled = self._core.CompiledGrammar.deserialize_json(text, self._info)
        if (took := time.process_time() - started) > UNPACK_LIMIT_S:
            raise GrammarError(f"unpacking it takes {took:.2f} s, limit {UNPACK_LIMIT_S} s: make it simpler")
        matcher = self._core.GrammarMatcher(compiled, list(self._stop_ids), False, -1, None)
        mask = np.zeros((1, -(-self._info.vocab_size() // 32)), dtype=np.int32)
        draw = random.Random(0)  # noqa: S311 - it picks a path to measure, nothing else
        started = time.process_time()
        for place in range(PROBE_TOKENS):
            matcher.fill_next_token_bitmask(mask, 0, False)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not place and not allowed.size:
                raise GrammarError("no text has this form")
            going_on = allowed[~np.isin(allowed, self._stop_ids)]
            if not going_on.size or not matcher.accept_token(int(draw.choice(going_on)), False):
                return
            if time.process_time() - started > PROBE_LIMIT_S:
                raise GrammarError(f"{PROBE_TOKENS} of its masks take more than {PROBE_LIMIT_S} s: make it simpler")


def _literal(text: str) -> str:
    """Return a text as a literal of the grammar's language."""
    plain = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(plain.get(c) or (c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'


def _schemas_in(tag: Any, depth: int) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag."""
    if depth > 64:
        raise SchemaError("the structural tag is nested more than 64 deep")
    if isinstance(tag, dict):
        for key, value in tag.items():
            if key in ("json_schema", "schema"):
                yield value
            else:
                yield from _schemas_in(value, depth + 1)
    elif isinstance(tag, list):
        for value in tag:
            yield from _schemas_in(value, depth + 1)


def _in_short(message: str) -> str:
    """Return what xgrammar said, without the place in its source."""
    text = _PLACE_IN_SOURCE.sub("", message.strip()).removeprefix("Warning: ")
    text = text.replace("Check failed: (error.empty()) is false: ", "")
    return text if len(text) <= 500 else text[:497] + "..."


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what the library warns of meanwhile: it says on standard error what it leaves out."""
    found: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines = caught.read().decode("utf-8", "replace").splitlines()
            found += [line for line in lines if "Warning: " in line]


def main() -> None:
    """Serve jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody; the frontend decides
    _die_with_parent()
    jobs, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get among the frames
    folder, stop_ids = Path(sys.argv[1]), tuple(json.loads(sys.argv[2]))
    sys.modules["torch"] = None  # type: ignore[assignment] # tvm_ffi would import it, and does well without
    try:
        compiler = Compiler(folder, stop_ids)
    except (VocabularyError, ImportError) as error:
        _write(results, Outcome(error=str(error)))
        return
    _limit_memory()
    _write(results, Outcome(ready=True))
    decoder = msgspec.msgpack.Decoder(Job)
    while (head := jobs.read(LENGTH.size)) and len(head) == LENGTH.size:
        job = decoder.decode(jobs.read(LENGTH.unpack(head)[0]))
        try:
            outcome = Outcome(body=compiler.compile(job))
        except GrammarError as error:
            outcome = Outcome(error=str(error) or "it cannot be compiled")
        _write(results, outcome)


def _write(results: BinaryIO, outcome: Outcome) -> None:
    data = msgspec.msgpack.encode(outcome)
    results.write(LENGTH.pack(len(data)) + data)
    results.flush()


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main()
