"""Patterns of layers mean what Python's own expressions mean, and no pattern takes long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.errors import ModelConfigError
from octavo.worker.quantization.patterns import Pattern

NAME = "model.layers.11.mlp.experts.3.gate_proj"


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        (r".*\.gate_proj", True),
        (r".*gate", True),
        (r".*gate$", False),
        (r"^model\.layers\.(?:[0-9]|1[0-5])\.mlp.*", True),
        (r"model\.layers\.(2|3)\..*", False),
        (r"(?!.*\.mlp\.).*", False),
        (r"^(?!.*self_attn).*proj$", True),
        (r"model\.layers\.\d+\.mlp\.experts\.\d{1,2}\.(gate|up)_proj$", True),
        (r"layers", False),
        ("", True),
    ],
)
def test_patterns_of_real_configs(expression: str, matches: bool) -> None:
    assert Pattern(expression).matches(NAME) is matches
    assert (re.match(expression, NAME) is not None) is matches


ATOMS = st.sampled_from(
    ["a", "b", "1", ".", r"\.", r"\d", r"\w", r"\D", "[ab]", "[^a]", "[a-c.]", "[]a]", "[a-]", "-", "^", "$"]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{1,}", "*?"])).map(
            lambda part: f"(?:{part[0]}){part[1]}"
        ),
        inner.map(lambda part: f"(?={part})"),
        inner.map(lambda part: f"(?!{part})"),
    ),
    max_leaves=8,
)  # fmt: skip


@given(EXPRESSIONS, st.text("ab1.-", max_size=6))
def test_a_pattern_means_what_it_means_to_python(expression: str, name: str) -> None:
    assert Pattern(expression).matches(name) is (re.match(expression, name) is not None)


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(a|aa)+b", "((a*)*)*b", ".*.*.*.*.*.*.*.*b", "((a{0,100}){0,100}){0,100}b", "(.*)*x"]
)
def test_no_pattern_takes_exponential_time(expression: str) -> None:
    # Python's own matcher would not come back from most of these in a lifetime.
    Pattern(expression).matches("a" * 400 + "!")


def test_the_steps_of_a_match_are_bounded() -> None:
    with pytest.raises(ModelConfigError, match="takes more than 100000 steps to match 'aaa"):
        Pattern("((?=(.*)*b)|a)*" * 20).matches("a" * 500)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(", "it is not|a group that is not closed"),
        ("a)", "a group is closed that was not opened"),
        ("*a", "nothing to repeat"),
        ("a**", "a repetition of a repetition"),
        ("a++", "a repetition of a repetition"),
        ("(?<=a)b", "a group that is neither plain"),
        ("(?P<x>a)", "a group that is neither plain"),
        (r"(a)\1", r"\\1"),
        (r"\bword", r"\\b"),
        ("a{", "a brace that holds no bounds"),
        ("a{3,2}", "expected 0 to 100, rising"),
        ("a{101}", "expected 0 to 100, rising"),
        ("[a", "it ends too early"),
        ("[b-a]", "range b-a"),
        ("\\", "it ends too early"),
        ("(" * 17 + ")" * 17, "groups nest deeper than 16"),
        ("a" * 1025, "has 1025 characters, limit 1024"),
    ],
)
def test_what_is_not_supported_is_named(expression: str, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        Pattern(expression)


def test_long_names_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="has 513 characters, limit 512"):
        Pattern(".*").matches("a" * 513)
