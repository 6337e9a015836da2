"""Compiled grammars for tests, and what they take."""

from pathlib import Path

from octavo.frontend.grammar_compiler import Compiler
from octavo.frontend.grammar_jobs import Job
from tests.support.tiny_tokenizers import EOS_ID, byte_level


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with a few merges into a folder, and return that."""
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def compile_grammar(folder: Path, kind: str, text: str, stop_ids: tuple[int, ...] = (EOS_ID,)) -> bytes:
    """Return a grammar as it travels."""
    return Compiler(folder, stop_ids).compile(Job(kind, text))
