"""What is costly to make is made now and then, however often it is asked for."""

from shoal.coordinator.http.reports import SHARE, Costly


def test_making_it_takes_a_bounded_share_of_the_time() -> None:
    now_s, made = 0.0, 0

    def make() -> str:
        nonlocal now_s, made
        now_s, made = now_s + 0.5, made + 1
        return f"status {made}"

    costly = Costly(make, lambda: now_s)
    while now_s < 100.0:
        assert costly.get() == f"status {made}".encode()
        now_s += 0.01
    assert 0.9 * SHARE * 100.0 <= 0.5 * made <= 1.1 * SHARE * 100.0


def test_what_is_cheap_is_as_good_as_new() -> None:
    now_s = 0.0
    costly = Costly(lambda: f"at {now_s}", lambda: now_s)
    costly.get()
    now_s = 0.001
    assert costly.get() == b"at 0.001"
