"""What leaves REQUESTS, and in how few calls."""

from services.scheduler.ended import EndedRequests, Removable


def test_what_ended_before_the_oldest_open_request_goes_in_one_call() -> None:
    ended = EndedRequests()
    for seq, request_id in enumerate(("a", "b", "c", "d"), start=5):
        ended.note_request(request_id, seq)
    for request_id in ("b", "a", "d"):
        ended.note_end(request_id)
    assert ended.take() == Removable(7, [])  # c, which is open
    assert ended.are_left  # d, behind it


def test_everything_goes_where_nothing_is_open() -> None:
    ended = EndedRequests()
    ended.note_request("a", 5)
    ended.note_request("b", 6)
    ended.note_end("b")
    ended.note_end("a")
    assert ended.take() == Removable(7, [])
    assert not ended.are_left


def test_one_long_request_does_not_keep_the_others_for_ever() -> None:
    ended = EndedRequests()
    ended.note_request("long", 1)
    ended.note_request("short", 2)
    ended.note_end("short")
    looks = [ended.take() for _ in range(11)]
    assert looks[:-1] == [Removable(0, [])] * 10
    assert looks[-1] == Removable(0, ["short"])
    assert not ended.are_left


def test_a_request_that_was_stored_again_is_no_older_than_it_is() -> None:
    ended = EndedRequests()
    ended.note_request("again", 1)
    ended.note_request("other", 2)
    ended.note_request("again", 3)
    ended.note_end("other")
    assert ended.take() == Removable(3, [])


def test_what_was_named_is_not_named_again() -> None:
    ended = EndedRequests()
    ended.note_request("a", 1)
    ended.note_end("a")
    assert ended.take() == Removable(2, [])
    assert ended.take() == Removable(0, [])
