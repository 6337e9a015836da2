"""The search alone: what it follows, keeps and ends with. tests/models/test_beam_search.py compares it with transformers."""

import pytest

from octavo.scheduler.beams import BeamSearch, Child, Hypothesis
from octavo.wire.requests import BeamParams, FinishReason

STOP, LENGTH, TIME_LIMIT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIME_LIMIT
END = 9


def search(
    width: int = 2, max_tokens: int = 4, min_tokens: int = 0, penalty: float = 1.0, early: bool = False
) -> BeamSearch:
    return BeamSearch(BeamParams(width, penalty, early), max_tokens, min_tokens, frozenset([END]))


def test_the_likeliest_go_on_whatever_beam_they_come_from() -> None:
    one = search()
    assert one.step([[(1, -0.25), (2, -0.5), (3, -9.0)]]) == [Child(0, 1), Child(0, 2)]
    assert one.step([[(4, -5.0), (5, -6.0)], [(6, -0.5), (7, -1.5)]]) == [Child(1, 6), Child(1, 7)]
    assert one.num_beams == 2
    assert one.best(2, TIME_LIMIT) == [
        Hypothesis([2, 6], -1.0, -0.5, TIME_LIMIT),
        Hypothesis([2, 7], -2.0, -1.0, TIME_LIMIT),
    ]


def test_an_end_counts_among_the_likeliest_alone() -> None:
    one = search()
    assert one.step([[(1, -0.25), (2, -0.5), (END, -0.75)]]) == [Child(0, 1), Child(0, 2)]
    assert one.best(2) == []
    assert one.step([[(END, -0.25), (3, -0.5)], [(4, -1.0), (5, -2.0)]]) == [Child(0, 3), Child(1, 4)]
    assert one.best(2) == [Hypothesis([1, END], -0.5, -0.25, STOP)]


def test_no_end_before_min_tokens() -> None:
    one = search(min_tokens=1)
    assert one.step([[(END, -0.1), (1, -0.2), (2, -0.3)]]) == [Child(0, 1), Child(0, 2)]
    assert one.step([[(END, -0.1), (3, -0.2)], [(4, -0.3)]]) == [Child(0, 3), Child(1, 4)]
    assert [found.ids for found in one.best(1)] == [[1, END]]


@pytest.mark.parametrize("early", [True, False])
def test_early_stopping_ends_with_as_many_ended_ones_as_the_search_is_wide(early: bool) -> None:
    one = search(early=early)
    assert one.step([[(END, -0.5), (1, -0.6), (2, -0.7)]]) == [Child(0, 1), Child(0, 2)]
    going = one.step([[(END, -0.1), (3, -0.15), (4, -3.0)], [(5, -4.0)]])
    # Two have ended with -0.35 and -0.5; what goes on has -0.375.
    assert going == ([] if early else [Child(0, 3), Child(0, 4)])
    assert one.is_over is early


def test_it_is_over_when_none_that_goes_on_ranks_above_the_worst_ended_one() -> None:
    one = search(width=1)
    assert one.step([[(END, -0.1), (1, -3.0)]]) == []
    assert one.is_over
    assert [found.ids for found in one.best(1)] == [[END]]


def test_the_last_token_ends_all() -> None:
    one = search(max_tokens=1)
    assert one.step([[(1, -0.1), (END, -0.2), (2, -0.3)]]) == []
    assert [(found.ids, found.reason) for found in one.best(2)] == [([1], LENGTH), ([END], STOP)]


def test_begun_anew_it_knows_nothing_of_before() -> None:
    one = search(max_tokens=1)
    one.step([[(1, -0.1), (2, -0.2)]])
    one.restart()
    assert (one.is_over, one.num_beams, one.best(2)) == (False, 1, [])


def test_cut_before_its_first_token_it_has_empty_answers() -> None:
    assert search().best(2, TIME_LIMIT) == [Hypothesis([], 0.0, 0.0, TIME_LIMIT)] * 2


def test_what_cannot_be_drawn_is_no_candidate() -> None:
    one = search()
    assert one.step([[(1, -0.1), (2, float("-inf")), (3, float("-inf"))]]) == [Child(0, 1)]
    assert one.num_beams == 1
