"""Columns that are exchanged or have the other sign are found, others bring no sentence."""

import warnings

import numpy as np
import pytest
import torch

import kbf
from kbf.fitted.column_order import (
    MAX_COLUMNS,
    MAX_ROWS,
    ChangedErrors,
    LinearPrediction,
    block_means,
    changes,
    find_change,
    first_rows,
    moves_in,
)
from kbf.runtime.errors import DataWarning

FREE = [True] * 4


def series(seed: int, rows: int = 400) -> torch.Tensor:
    """Three observations of a motion without symmetries, and a control."""
    generator = torch.Generator().manual_seed(seed)
    A = torch.tensor([[0.9, 0.3, 0.0], [-0.2, 0.7, 0.2], [0.0, 0.1, 0.5]], dtype=torch.float64)
    u = torch.randn(rows, 1, dtype=torch.float64, generator=generator)
    b = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    e = 0.3 * torch.randn(rows, 3, dtype=torch.float64, generator=generator)
    x = torch.zeros(rows, 3, dtype=torch.float64)
    for t in range(1, rows):
        x[t] = A @ x[t - 1] + u[t] * b + e[t]
    return torch.cat([x, u], 1)


def test_errors_after_a_change_are_those_of_the_changed_recording():
    training, values = series(0), series(1)
    values[3:9, 1] = torch.nan
    prediction = LinearPrediction([training[:150], training[150:]], 3)
    errors = ChangedErrors(prediction, *moves_in([values[:80], values[80:]]))
    for columns in changes(3, FREE):
        changed = values.clone()
        new = -values[:, columns] if len(columns) == 1 else values[:, columns[::-1]]
        changed[:, columns] = new
        expected = ChangedErrors(prediction, *moves_in([changed[:80], changed[80:]])).as_given
        torch.testing.assert_close(errors.after_change(columns), expected)
        assert not torch.allclose(errors.as_given, expected)


def test_coefficients_are_those_of_least_squares():
    values = series(0, 4000)
    prediction = LinearPrediction([values], 3)
    A, B = prediction.sides(*moves_in([values]))
    expected = torch.linalg.lstsq(A, B).solution
    torch.testing.assert_close(prediction.coefficients, expected, atol=0.01, rtol=0.02)
    whitened = (B - A @ prediction.coefficients) @ prediction.whitening
    assert torch.allclose(whitened.T.cov(correction=0), torch.eye(3).double(), atol=0.01)
    expected = 3 * torch.log1p(whitened.square().sum(1) / 3)
    torch.testing.assert_close(prediction.errors, expected)


@pytest.mark.parametrize(
    ("columns", "change"),
    [((0,), [-1, 2, 3]), ((3,), [1, 2, -3]), ((0, 1), [2, 1, 3]), ((1, 2), [1, 3, 2])],
)
def test_changes_are_named(columns: tuple[int, ...], change: list[int]):
    values = series(1, 200)
    if columns == (3,):
        values[:, 3] *= -1
    elif columns == (0,):
        values[:, 0] *= -1
    else:
        values[:, list(columns)] = values[:, list(reversed(columns))]
    found = find_change([series(0)], [values], 3, FREE)
    assert found is not None
    assert found.columns == columns
    assert found.error < 1.2 * found.in_training < found.as_given


def test_ordinary_recordings_bring_no_change():
    training = series(0)
    found = [find_change([training], [series(k, 120)], 3, FREE) for k in range(1, 61)]
    assert found == [None] * 60


def test_symmetric_laws_bring_no_change():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(600, 2, dtype=torch.float64, generator=generator)
    training, values = noise[:300], noise[300:] * torch.tensor([1.0, -1.0])
    assert find_change([training], [values], 2, [True, True]) is None


def test_another_law_is_no_change_of_columns():
    values = series(1, 300).cumsum(0)
    assert find_change([series(0)], [values], 3, FREE) is None


def test_quieter_recordings_bring_no_change():
    """The second sensor moves more than the first, as in the training the first does."""

    def pair(seed: int, *sizes: float) -> torch.Tensor:
        e = torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x = torch.zeros(300, 2, dtype=torch.float64)
        for t in range(1, 300):
            x[t] = 0.95 * x[t - 1] + e[t] * torch.tensor(sizes)
        return x

    free = [True, True]
    found = [find_change([pair(0, 1.0, 0.6)], [pair(k, 0.3, 0.5)], 2, free) for k in range(1, 21)]
    assert found == [None] * 20


def test_columns_that_are_not_free_stay():
    values = series(1, 200)
    values[:, 0] *= -1
    every = find_change([series(0)], [values], 3, FREE)
    assert every is not None
    assert every.columns == (0,)
    some = find_change([series(0)], [values], 3, [False, False, False, True])
    assert some is None


def test_controls_are_not_exchanged_with_observations():
    found = list(changes(2, [True, True, True, True]))
    assert found == [[0], [1], [2], [3], [0, 1], [2, 3]]


def test_pairs_of_many_columns_are_left_out():
    assert len(list(changes(MAX_COLUMNS, [True] * MAX_COLUMNS))) == MAX_COLUMNS * 65 // 2
    assert len(list(changes(MAX_COLUMNS + 1, [True] * (MAX_COLUMNS + 1)))) == MAX_COLUMNS + 1


def test_few_rows_are_not_compared():
    values = series(1, 81)[:, [1, 0, 2, 3]]
    assert find_change([series(0)], [values[:80]], 3, FREE) is None
    found = find_change([series(0)], [values], 3, FREE)
    assert found is not None
    assert found.columns == (0, 1)


def test_rows_of_one_recording_do_not_follow_those_of_another():
    """Of 40 short recordings the moves within each count."""
    values = series(1, 400)[:, [1, 0, 2, 3]]
    found = find_change([series(0)], list(values.split(10)), 3, FREE)
    assert found is not None
    assert found.columns == (0, 1)
    before, after = moves_in([values[:5], values[:0], values[5:7]])
    torch.testing.assert_close(before, values[[0, 1, 2, 3, 5]])
    torch.testing.assert_close(after, values[[1, 2, 3, 4, 6]])


def test_rows_are_limited():
    long = [torch.zeros(MAX_ROWS - 10, 1), torch.zeros(30, 1), torch.zeros(MAX_ROWS, 1)]
    assert [len(each) for each in first_rows(long)] == [MAX_ROWS - 10, 10]
    assert block_means(torch.arange(45.0)).tolist() == [2 * k + 0.5 for k in range(20)]


@pytest.fixture(scope="module")
def fitted() -> kbf.FittedFilter:
    """A Kalman filter of the third observation as a state, from the two others and the control."""
    values = series(0).numpy()
    columns = {"states": values[:, 2:3], "observations": values[:, :2], "controls": values[:, 3:]}
    return kbf.fit(**columns, model="kalman", progress=False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x[:, ::-1], "the columns x1 and x2 seem to be exchanged"),
        (lambda x: x * [1, -1], "column x2 seems to have the other sign, relative to the others"),
    ],
)
def test_filters_warn_of_changed_columns(fitted: kbf.FittedFilter, change, text: str):
    values = series(2, 300).numpy()
    x, u = values[:, :2], values[:, 3:]
    changed, online = np.ascontiguousarray(change(x)), fitted.online()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.filter(observations=x, controls=u)
    with pytest.warns(DataWarning, match=text) as found:
        fitted.filter(observations=changed, controls=u)
    assert len(found) == 1
    with pytest.warns(DataWarning, match=text):
        estimates = [online.step(a, control=b) for a, b in zip(changed[:150], u, strict=False)]
    assert len(estimates) == 150
