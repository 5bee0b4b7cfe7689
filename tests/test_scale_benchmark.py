"""A generated bucket lists what it should, and the prediction of a step is arithmetic on stated terms."""

from functools import partial

import pytest

from workshop_utils.data import list_photos


def test_one_rank_sends_nothing(benchmark):
    assert benchmark("steps").predict(1, 1.2, [100, 300], latency_s=9.0, bytes_per_s=1.0) == pytest.approx(1.2)


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it(benchmark):
    predict = benchmark("steps").predict
    # The first is ready after 0.75 s and takes 1 s, the second is ready after 1 s, and waits.
    assert predict(2, 1.0, [100, 100], latency_s=0.0, bytes_per_s=100.0, backward=0.5) == pytest.approx(2.75)
    # On a fast link only the last one's way shows, 0.01 s.
    assert predict(2, 1.0, [100, 100], latency_s=0.0, bytes_per_s=10_000.0, backward=0.5) == pytest.approx(1.01)


def test_more_ranks_pay_latency_for_each_bucket_and_less_than_twice_the_bytes(benchmark):
    predict = benchmark("steps").predict
    assert predict(8, 0.0, [80, 80], latency_s=1.0, bytes_per_s=1e9) == pytest.approx(2 * 2 * 7)
    assert predict(64, 0.0, [64], latency_s=0.0, bytes_per_s=1.0) == pytest.approx(2 * 63)


def test_the_fit_finds_the_link_that_made_the_figures(benchmark):
    seconds = {str(size): 2 * 0.003 + size / 25e6 for size in (1e5, 1e6, 1e7)}
    latency_s, bytes_per_s = benchmark("steps").fit({str(int(float(size))): took for size, took in seconds.items()})
    assert (latency_s, bytes_per_s) == pytest.approx((0.003, 25e6))


def test_the_curve_falls_with_every_rank(benchmark):
    steps = benchmark("steps")
    for compute_s in steps.NETWORK_COMPUTE_S:
        rows = [row for row in steps.curve([2_000_000, 40_000_000]) if row["compute_s"] == compute_s]
        assert [row["ranks"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
        efficiency = [row["efficiency"] for row in rows]
        assert efficiency[0] == pytest.approx(1) and efficiency == sorted(efficiency, reverse=True)


def test_a_generated_bucket_lists_as_many_photos_as_asked_for(benchmark):
    bucket, folders = benchmark("generated_bucket"), ["n00000001-a", "n00000002-b", "n00000003-c"]
    with bucket.generated_bucket(folders, 4000, 0) as endpoint:
        options = {"anon": True, "client_kwargs": {"endpoint_url": endpoint}}
        photos = list_photos("s3://any/dogs", storage_options=options)
    assert len(set(photos)) == 4000 and photos[-1] == "s3://any/dogs/n00000003-c/n00000003_0001332.jpg"


def test_each_round_takes_every_figure_once_and_all_are_kept(benchmark):
    taken = []

    def measure(way):
        taken.append(way)
        return {"seconds": len(taken)}

    rows = benchmark("scale").in_turn(3, [({"way": way}, partial(measure, way)) for way in "ab"])
    assert taken == list("ababab")
    assert rows[1] == {"way": "b", "seconds": 4, "runs": [{"seconds": 2}, {"seconds": 4}, {"seconds": 6}]}
    assert benchmark("scale").table(rows) == ["way  seconds", "  a        3", "  b        4"]
