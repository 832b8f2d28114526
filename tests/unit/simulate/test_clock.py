from random import Random

from tools.simulate.clock import Clock, Network, Timer


def run_out(clock: Clock) -> None:
    while clock.step():
        pass


def test_what_is_due_first_happens_first_and_ties_keep_their_order() -> None:
    clock, happened = Clock(), list[tuple[str, float]]()
    for name, at in (("late", 2.0), ("one", 1.0), ("two", 1.0), ("past", -1.0)):
        clock.at(at, lambda name=name: happened.append((name, clock.now)))
    run_out(clock)
    assert happened == [("past", 0.0), ("one", 1.0), ("two", 1.0), ("late", 2.0)]


def test_a_timer_rings_once_at_the_time_that_was_set_last() -> None:
    clock, rung = Clock(), list[float]()
    timer = Timer(clock, lambda: rung.append(clock.now))
    timer.set(5.0)
    timer.set(3.0)
    run_out(clock)
    assert rung == [3.0]


def test_messages_of_one_link_arrive_in_order_whatever_the_jitter() -> None:
    clock, got = Clock(), list[tuple[str, int, float]]()
    network = Network(clock, Random(7), delay_s=0.001, jitter_s=0.01)
    for number in range(50):
        for link in ("a", "b"):
            network.send(link, lambda link=link, number=number: got.append((link, number, clock.now)))
    run_out(clock)
    for link in ("a", "b"):
        ours = [(number, at) for name, number, at in got if name == link]
        assert [number for number, _ in ours] == list(range(50))
        assert all(0.001 <= at <= 0.011 for _, at in ours)
    assert [name for name, _, _ in got] != ["a", "b"] * 50  # between links some do overtake
