"""Stop strings in text that comes in pieces."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stops import StopScanner

ALPHABET = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=0, max_size=4)


def first_complete(text: str, stops: list[str]) -> int | None:
    """Where the text ends, by looking at every end in turn: the naive way."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if end >= len(stop) and text[end - len(stop) : end] == stop]
        if starts:
            return min(starts)
    return None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(text=ALPHABET, stops=STOPS, places=st.lists(st.integers(0, 24), max_size=8))
def test_any_cutting_gives_what_the_naive_search_gives(text: str, stops: list[str], places: list[int]) -> None:
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece) for piece in cut(text, places))
    if not scanner.stopped:
        shown += scanner.finish()
    end = first_complete(text, stops)
    assert scanner.stopped == (end is not None)
    assert shown == text[:end]


@given(text=ALPHABET, stops=STOPS, places=st.lists(st.integers(0, 24), max_size=8))
def test_what_is_shown_is_never_taken_back(text: str, stops: list[str], places: list[int]) -> None:
    """Whatever follows, what has been shown stays a beginning of the final text."""
    pieces = cut(text, places)
    for count in range(len(pieces) + 1):
        scanner = StopScanner(stops)
        shown = "".join(scanner.push(piece) for piece in pieces[:count])
        for more in ("", "a", "b", "c", *stops):
            whole = "".join(pieces[:count]) + more
            assert whole[: first_complete(whole, stops)].startswith(shown)


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["STOP"])
    assert scanner.push("go on S") == "go on "
    assert scanner.push("T") == ""
    assert scanner.push("ART") == "START"
    assert scanner.push("STO") == ""
    assert scanner.finish() == "STO"


def test_a_stop_string_over_three_pieces_leaves_nothing() -> None:
    scanner = StopScanner(["###"])
    assert [scanner.push(piece) for piece in ("a#", "#", "#b")] == ["a", "", ""]
    assert scanner.stopped
    assert scanner.push("more") == ""


def test_of_two_complete_at_once_the_longer_counts() -> None:
    scanner = StopScanner(["c", "abc"])
    assert scanner.push("xab") == "x"
    assert scanner.push("c") == ""
    assert scanner.stopped
