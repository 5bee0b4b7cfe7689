"""What a lesson prints and draws of its measurements."""

import time

import pytest

from workshop_utils.measure import Measurements


@pytest.fixture
def measure(monkeypatch):
    """Measurements on a clock that only `time.sleep` moves."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    return Measurements(n_items=32)


def naps(*lengths):
    """Return a function each of whose calls sleeps for the next of these seconds, and returns them."""
    left = list(lengths)

    def nap():
        time.sleep(left[0])
        return left.pop(0)

    return nap


def alt_of(image):
    return image._repr_mimebundle_()[1]["image/png"]["alt"]


def test_the_fastest_round_counts_and_its_result_is_returned(measure, capsys):
    assert measure("a loop", naps(3.0, 1.0, 2.0)) == 1.0
    assert measure.seconds("a loop") == 1.0
    assert capsys.readouterr().out.split() == ["a", "loop", "1.00", "s", "32", "images/s"]


def test_no_further_round_begins_after_five_seconds(measure):
    assert measure("slow", naps(6.0)) == 6.0


def test_a_row_is_compared_with_the_first_one_or_with_one_that_is_named(measure, capsys):
    measure("a loop", naps(*[1.0] * 3))
    measure("slower", naps(*[2.5] * 3))
    measure("faster", naps(*[0.5] * 3), than="slower")
    measure("alike", naps(*[1.0] * 3))
    measure("half of it", naps(*[0.5] * 3), n_items=16)
    _, slower, faster, alike, half = capsys.readouterr().out.splitlines()
    assert slower.endswith('2.5× slower than "a loop"') and faster.endswith('5.0× faster than "slower"')
    assert alike.endswith('"a loop"') and "×" not in alike and "×" not in half


def test_measuring_again_replaces_a_row(measure):
    for seconds in (1.0, 2.0):
        measure("a loop", naps(*[seconds] * 3))
    assert measure.seconds("a loop") == 2.0 and len(measure.table()) == 1


def test_charts_say_in_words_what_they_show(measure):
    measure("a loop", naps(*[1.0] * 3))
    measure("tasks", naps(*[0.5] * 3))
    assert "a loop 32 images/s, tasks 64 images/s" in alt_of(measure.chart("Speed"))
    sizes = Measurements()
    for n_bytes in (8, 4_000_000):
        sizes(f"{n_bytes} bytes", naps(*[0.2] * 3), bytes=n_bytes, way="argument")
    assert "8 bytes 0.20 s, 4000000 bytes 0.20 s" in alt_of(sizes.chart("Sending", x="bytes", color="way"))
