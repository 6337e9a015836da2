"""Stop strings: found however tokens cut them, never shown, first to complete wins."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.stops import StopMatch, StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """Return what is shown piece by piece, and the stop string that ended it."""
    matcher = StopMatcher(stops, include)
    shown: list[str] = []
    for piece in pieces:
        found = matcher.feed(piece)
        if isinstance(found, StopMatch):
            return [*shown, found.text], found.stop_string
        shown.append(found)
    return [*shown, matcher.flush()], None


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return what is shown of a whole text: cut at the stop string that completes first, the longest of these."""
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    if not ends:
        return text, None
    end = min(ends.values())
    stop = max((s for s in ends if ends[s] == end), key=len)
    return text[: end if include else end - len(stop)], stop


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_cutting_shows_what_the_whole_text_shows(pieces: list[str], stops: list[str], include: bool) -> None:
    shown, stop = run(pieces, stops, include)
    assert ("".join(shown), stop) == oracle("".join(pieces), stops, include)


@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_what_is_held_back_could_become_a_stop_string(text: str, stops: list[str]) -> None:
    """After each piece, exactly the longest end that begins a stop string is missing."""
    matcher, shown = StopMatcher(stops, False), ""
    for place, char in enumerate(text, 1):
        found = matcher.feed(char)
        if isinstance(found, StopMatch):
            return
        shown += found
        held = text[len(shown) : place]
        suffixes = (text[place - n : place] for n in range(place, -1, -1))
        assert held == next(s for s in suffixes if any(stop.startswith(s) and s != stop for stop in stops))


def test_letters_of_a_stop_string_do_not_leak() -> None:
    assert run(list("PQRSTUVW"), ["RSTUV"]) == (["P", "Q", "", "", "", "", ""], "RSTUV")


def test_a_near_miss_appears_complete() -> None:
    shown, stop = run(list("RSTX"), ["RSTUV"])
    assert ("".join(shown), stop) == ("RSTX", None)


def test_the_end_releases_what_was_held() -> None:
    assert run(["ok RST"], ["RSTUV"]) == (["ok ", "RST"], None)


def test_included_stop_strings_end_the_text() -> None:
    assert run(["5 6 7", " 8", " 9 10"], ["7 8 9"], include=True) == (["5 6 ", "", "7 8 9"], "7 8 9")


def test_stop_strings_do_not_count_where_they_may_not() -> None:
    matcher = StopMatcher(["ab"], False)
    assert matcher.feed("xab", may_match=False) == "xab"
    assert matcher.feed("a", may_match=False) == ""
    assert matcher.feed("b") == StopMatch("ab", "")


def test_a_long_repetitive_stop_string_is_found_after_many_near_misses() -> None:
    stop = "a" * 1023 + "b"
    shown, found = run([*(["a" * 16] * 256), "b", "c"], [stop])
    assert ("".join(shown), found) == ("a" * (16 * 256 - 1023), stop)
