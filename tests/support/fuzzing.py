"""What fuzzing tests share: how often, how inputs are spoilt, and what no client may be told."""

import os
import re
from typing import Any

import hypothesis
from hypothesis import strategies as st

WANTED = int(os.environ.get("OCTAVO_FUZZ_EXAMPLES", "0"))
"""Examples a test; 0: few, and the same each time."""

hypothesis.settings.register_profile(
    "fuzz",
    max_examples=WANTED or 60,
    derandomize=not WANTED,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)

_LEAKS = re.compile(
    r"Traceback|site-packages|/root|/home|/tmp|/usr|\.py\b|octavo\.(frontend|wire|scheduler|cli)|0x[0-9a-f]{6}|<class|"
    r" object at |msgspec|[A-Z]\w*(Error|Exception)\b"
)


def refuse_leaks(text: str) -> None:
    """See that a text for clients names neither places of this machine nor classes of this program."""
    found = _LEAKS.search(text)
    assert not found, (found, text)


@st.composite
def spoilt(draw: Any, seeds: list[bytes]) -> bytes:
    """Draw one of some byte strings with a few places changed."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 20)))
        piece = draw(
            st.one_of(
                st.binary(max_size=6),
                st.sampled_from([b"", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\0", b"\xed\xa0\x80", b"\x80"]),
                st.just(bytes(data[start:end]) * 3),
                st.sampled_from(seeds),
            )
        )
        data[start:end] = piece
    return bytes(data)
