"""A call that cannot be, or a misspelt setting, is refused where it is written, and any other goes its way."""

import functools
import warnings

import dask
import pytest

import daskrun


def fit(epochs, lr=0.1, *, timeout=60):
    return epochs, lr, timeout


def swallow(*args, **config):
    return args, config


def backend_first(backend):
    return backend


def with_first(function):
    """A decorator that gives its function an argument, as some do."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(1, *args, **kwargs)

    return call


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "message"),
    [
        (fit, (), {}, "fit cannot be called so: .*'epochs'"),
        (fit, (1, 2, 3), {}, "too many positional arguments"),
        (fit, (1,), {"epochs": 2}, "multiple values for argument 'epochs'"),
        (fit, (1,), {"max_restart": 1}, "Did you mean max_restarts?"),
        (fit, (), {"epoch": 1}, "Did you mean epochs?"),
        (functools.partial(fit, 1), (2, 3), {}, "fit cannot be called so: "),
        (swallow, (), {"max_restart": 1}, "swallow .*did you mean max_restarts"),
        (functools.lru_cache(swallow), (), {"max_restart": 1}, "swallow .*did you mean max_restarts"),
        (5, (), {}, "5 cannot be called"),
    ],
)
def test_a_call_that_cannot_be_is_refused_before_there_is_a_cluster(fn, args, kwargs, message):
    with pytest.raises(TypeError, match=message):
        daskrun.launch(None, fn, *args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda lazy: lazy, lambda lazy: [1, lazy], lambda lazy: {"data": lazy}])
def test_what_dask_has_still_to_compute_is_refused_with_the_cure(client, wrap):
    for lazy in (client.submit(int), dask.delayed(int)()):
        with pytest.raises(TypeError, match=f"Dask's {type(lazy).__name__}.*future.result"):
            daskrun.launch(client, fit, wrap(lazy))
        with pytest.raises(TypeError, match=r"collection.compute\(\)"):
            daskrun.launch(client, fit, 1, lr=wrap(lazy))


def test_a_backend_that_the_function_needs_and_launch_takes_is_explained():
    with pytest.raises(TypeError, match=r"functools.partial\(backend_first, backend="):
        daskrun.launch(None, backend_first, backend="gloo")


@pytest.mark.smoke
def test_any_other_call_goes_its_way(client):
    assert daskrun.run(client, swallow, 1, num_workers=2, lr=0.1, n_workers=1) == [
        ((1,), {"num_workers": 2, "lr": 0.1})
    ]
    assert daskrun.run(client, functools.partial(swallow, max_restart=1), n_workers=1) == [((), {"max_restart": 1})]
    assert daskrun.run(client, with_first(fit), 0.2, n_workers=1) == [(1, 0.2, 60)]
    assert daskrun.run(client, max, 2, 3, n_workers=1) == [3]  # it does not tell what it takes
    assert daskrun.run(client, dict, lr=1, n_workers=1) == [{"lr": 1}]


@pytest.mark.smoke
def test_a_setting_that_the_function_takes_too_goes_to_launch_with_a_warning(client):
    with pytest.warns(UserWarning, match="timeout=90 goes to launch, and not to fit"):
        assert daskrun.run(client, fit, 1, timeout=90, n_workers=1) == [(1, 0.1, 60)]
    with warnings.catch_warnings(action="error"):
        assert daskrun.run(client, functools.partial(fit, timeout=5), 1, timeout=90, n_workers=1) == [(1, 0.1, 5)]
        assert daskrun.run(client, backend_first, "mine", backend="gloo", n_workers=1) == ["mine"]
