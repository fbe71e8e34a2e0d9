"""When the next life begins; the time is the test's."""

from __future__ import annotations

import pytest

from stretto.launch.restarts import Restarts


def test_the_wait_doubles_up_to_its_bound() -> None:
    """Each death in the window doubles the wait, and none waits longer than the bound."""
    restarts = Restarts(deaths=100)
    delays = [restarts.delay_after_death(float(now), 0.0) for now in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_the_fifth_young_death_within_a_minute_opens_the_breaker() -> None:
    """Four deaths have a successor, the fifth has none."""
    restarts = Restarts()
    assert [restarts.delay_after_death(now, 9.9) for now in (0.0, 15.0, 30.0, 45.0, 59.9)] == [
        *(0.1, 0.2, 0.4, 0.8),
        None,
    ]


def test_deaths_older_than_the_window_do_not_count() -> None:
    """A death every 16 seconds is endured for ever."""
    restarts = Restarts()
    assert None not in [restarts.delay_after_death(16.0 * number, 0.0) for number in range(50)]


@pytest.mark.parametrize(("uptime_s", "delay_s"), [(9.9, None), (10.0, 0.1)])
def test_a_life_that_was_long_enough_forgives_the_deaths_before_it(
    uptime_s: float, delay_s: float | None
) -> None:
    """Ten seconds of service reset the back-off and the breaker."""
    restarts = Restarts()
    for now in range(4):
        restarts.delay_after_death(float(now), 0.0)
    assert restarts.delay_after_death(14.0, uptime_s) == delay_s
