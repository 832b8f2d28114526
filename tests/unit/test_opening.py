"""A block's opening."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.opening import NO_OPENING, Opening

shares = st.floats(0, 1)
counts = st.integers(0, 64)


@pytest.mark.parametrize(
    ("committed", "left", "applied"), [(0, 8, 0.9), (3, 5, 0.9), (4, 4, 0.5), (7, 1, 0.5), (3, 1, 0.5), (1, 1, 0.5)]
)
def test_it_holds_until_its_share_of_what_the_block_commits_is_there(committed: int, left: int, applied: float) -> None:
    assert Opening(share=0.5, threshold=0.9).applied(0.5, committed=committed, left=left) == applied


@given(share=shares, floor=shares, threshold=shares, committed=counts, left=counts)
def test_it_never_lowers_a_threshold_and_never_raises_it_beyond_its_own(
    share: float, floor: float, threshold: float, committed: int, left: int
) -> None:
    applied = Opening(share=share, threshold=floor).applied(threshold, committed=committed, left=left)
    assert applied in (threshold, max(threshold, floor))


@pytest.mark.parametrize(("threshold", "applied"), [(0.4, 0.4), (0.49, 0.49), (0.5, 0.9), (0.9, 0.9), (0.95, 0.95)])
def test_who_runs_below_its_least_threshold_has_none(threshold: float, applied: float) -> None:
    assert Opening(share=0.5, threshold=0.9, least=0.5).applied(threshold, committed=0, left=8) == applied


@pytest.mark.parametrize(
    ("opening", "words"),
    [
        (NO_OPENING, "no opening"),
        (Opening(share=0.7, threshold=0.9), "an opening of 0.7 at 0.9"),
        (Opening(share=0.7, threshold=0.9, least=0.5), "an opening of 0.7 at 0.9 from 0.5 on"),
    ],
)
def test_its_words_tell_openings_apart(opening: Opening, words: str) -> None:
    assert opening.words == words


@given(threshold=shares, committed=counts, left=counts)
def test_there_may_be_none(threshold: float, committed: int, left: int) -> None:
    assert NO_OPENING.applied(threshold, committed=committed, left=left) == threshold


@given(share=shares, committed=counts, total=counts)
def test_once_over_it_stays_over(share: float, committed: int, total: int) -> None:
    opening, committed = Opening(share=share, threshold=1.0), min(committed, total)
    if opening.applied(0.0, committed=committed, left=total - committed) == 0.0 and committed < total:
        assert opening.applied(0.0, committed=committed + 1, left=total - committed - 1) == 0.0
