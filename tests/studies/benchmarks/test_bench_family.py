"""Benchmarks of the forms of conditional means, of training through the filter, and of other
libraries.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from kbf.cli import main
from kbf.data.synthetic import SyntheticData
from kbf.rkhs import conditional_means
from kbf.ssm import oscillatory
from studies.benchmarks import peers_regression
from studies.benchmarks.cme import best, forms, left_out, of_all
from studies.benchmarks.end_to_end import DUAL, PRIMAL, cut, held, loss_of, model, train_step
from studies.benchmarks.peers import LIBRARIES, SIZES, library, works
from studies.benchmarks.peers_sides import jacobian, move, turning


def module(name):
    return importlib.import_module(f"studies.benchmarks.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cme", "end_to_end", "peers"])
def test_smoke(name, tmp_path, monkeypatch):
    if name == "peers":  # whatever is installed here: the others take seconds to import
        monkeypatch.setattr(
            module(name),
            "library",
            lambda asked: library(asked) if asked.startswith("filterpy") else None,
        )
    assert main(["bench", name, "size=smoke", f"run_dir={tmp_path}"]) == 0
    assert {file.name for file in tmp_path.iterdir()} >= {
        "results.csv",
        "figure.png",
        "claims.md",
        "about.json",
    }


# cme


@pytest.fixture
def pairs(normal):
    x = normal(30, 2)
    return x, oscillatory().f(x) + 0.1 * normal(30, 2)


def test_each_form_with_all_points_is_the_exact_one(pairs, normal):
    x, z = pairs
    table = {form: fit for (form, _), (fit, _) in forms(x, z, [30], [30]).items()}
    query, width = normal(5, 2), 0.8
    exact = table.pop("exact")(width, 1e-3).mean(query)
    assert len(table) == 8
    for form in set(table) - {"random Fourier", "Nadaraya-Watson"}:
        torch.testing.assert_close(
            table[form](width, 1e-3).mean(query), exact, rtol=1e-4, atol=1e-4
        )
    many = forms(x, z, [], [])
    assert {form for form, _ in many} == {"exact", "Nadaraya-Watson"}


def test_leave_one_out_is_what_it_says(pairs):
    x, z = pairs
    table = {form: fit for (form, _), (fit, _) in forms(x, z, [30], [30]).items()}
    width, reg = 0.8, 1e-2
    for form in ("exact", "Nadaraya-Watson"):
        errors = []
        for i in range(len(x)):
            kept = torch.arange(len(x)) != i
            fits = {name: fit for (name, _), (fit, _) in forms(x[kept], z[kept], [], []).items()}
            less = reg * len(x) / (len(x) - 1)  # the same ridge n reg
            errors.append((fits[form](width, less).mean(x[i]) - z[i]).square().sum())
        assert left_out(table[form](width, reg), x, z) == pytest.approx(
            torch.stack(errors).mean().item()
        )
    grid = [(width, reg), (0.1, 1e-6)]
    assert of_all(grid, x, z, 30) == best(grid, table["exact"], x, z) == (width, reg)
    own = conditional_means.feature_loo(
        conditional_means.incomplete_cholesky(lambda a, b: a @ b.mT, x, z, reg, rank=2), z
    ) / len(x)
    ridge = conditional_means.exact(lambda a, b: a @ b.mT, x, z, reg)
    assert left_out(ridge, x, z) == pytest.approx(own.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("error", "times", "reached", "told"),
    [
        (0.01, 60.0, True, "60 times"),
        (0.01, 40.0, False, "40 times"),
        (0.03, 900.0, False, "no form"),
    ],
)
def test_claim_of_cme(error, times, reached, told):
    rows = [
        {"form": "exact", "m": 9, "error above exact": 0.0, "times faster than exact": 1.0},
        {"form": "nearest", "m": 3, "error above exact": error, "times faster than exact": times},
    ]
    (claim,) = module("cme").claims(rows)
    assert claim.reached is reached
    assert told in claim.measured


# end_to_end


@pytest.fixture
def training():
    data = SyntheticData(oscillatory(), n_train=30, n_test=16, seed=0)
    memory, windows = data.train[0], cut(data.test[0], 8)
    return {form: model(form, 4, memory) for form in (PRIMAL, DUAL)}, memory, windows


def test_both_forms_have_one_loss_and_one_gradient(training):
    models, memory, windows = training
    (loss, gradient), (other, its) = (
        train_step(models[form], memory, windows) for form in (PRIMAL, DUAL)
    )
    assert loss == pytest.approx(other, rel=1e-9)
    torch.testing.assert_close(gradient, its, rtol=1e-6, atol=1e-9 * its.abs().max().item())
    assert its.abs().max() > 0


def test_the_gradient_is_that_of_the_loss(training):
    models, memory, windows = training
    for net in models.values():
        _, gradient = train_step(net, memory, windows)
        weight, step, values = net.log_reg, 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                weight[2] += sign * step
                values.append(loss_of(net, memory, windows).item())
                weight[2] -= sign * step
        names = [name for name, p in net.named_parameters() if p.grad is not None]
        sizes = [p.numel() for p in net.parameters() if p.grad is not None]
        at = sum(sizes[: names.index("log_reg")]) + 2
        assert gradient[at].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


def test_the_dual_form_holds_the_larger_matrices(training):
    models, memory, windows = training
    primal, dual = (held(models[form], memory, windows) for form in (PRIMAL, DUAL))
    assert dual - primal > 2 * 8 * 30 * 30 * 8  # a system and a factor, for 8 windows of 2 steps


@pytest.mark.parametrize(
    ("faster", "less", "apart", "reached"),
    [(11.0, 12.0, 1e-9, [1, 1, 1]), (9.0, 8.0, 1e-3, [0, 0, 0])],
)
def test_claims_of_end_to_end(faster, less, apart, reached):
    small = {"n": 5, "times faster than dual": 1.0, "times less memory than dual": 1.0}
    large = {"n": 50, "times faster than dual": faster, "times less memory than dual": less}
    rows = [
        {**row, "p": 2, "form": PRIMAL, "loss apart": 0.0, "gradients apart": apart}
        for row in (small, large)
    ]
    told = module("end_to_end").claims(rows)
    assert [claim.reached for claim in told] == [bool(value) for value in reached]


# peers


@pytest.mark.parametrize("name", sorted({name for names in LIBRARIES.values() for name in names}))
def test_equal_numbers(name):
    """Of those libraries that are installed."""
    pytest.importorskip(name)
    compared = 0
    for (work, _), sides in works({**SIZES["smoke"], "steps": 10}).items():
        if name in LIBRARIES[work] and name in sides:  # a particle filter draws numbers of its own
            assert (sides[name].call() - sides["kbf"].call()).abs().max().item() <= sides[
                name
            ].tolerance
            compared += 1
    assert compared > 0


def test_the_model_that_others_are_told_is_ours(normal):
    import numpy as np

    f = turning().f
    for z in normal(5, 2):
        torch.testing.assert_close(torch.from_numpy(move(np, z.numpy())), f(z))
        torch.testing.assert_close(
            torch.from_numpy(jacobian(np, z.numpy())), torch.func.jacrev(f)(z)
        )


def test_the_ratio_has_no_negative_coefficients():
    """Where they are cut and where ratios are cut is then the same."""
    for n, m in (SIZES["full"]["ratio"], SIZES["smoke"]["ratio"]):
        sides = peers_regression.ratio(n, m, lambda name: None)
        assert set(sides) == {"kbf", "kbf, KuLSIF"}
        assert (sides["kbf"].call() > 0).all()


def test_only_on_the_cpu():
    with pytest.raises(ValueError, match="on the CPU"):
        module("peers").run({**SIZES["smoke"], "device": "cuda"}, print)


@pytest.mark.parametrize(("apart", "reached"), [(1e-12, True), (1e-3, False)])
def test_claims_of_peers(apart, reached):
    row = {
        "work": "EKF",
        "size": "1",
        "library": "filterpy",
        "times ours": 2.0,
        "largest difference": apart,
        "tolerance": 1e-8,
    }
    other = {
        **row,
        "library": "filterpy, as it comes",
        "largest difference": 1.0,
        "tolerance": None,
    }
    told = {claim.target: claim for claim in module("peers").claims([row, other])}
    assert told["the same numbers as filterpy"].reached is reached
    assert told["time of filterpy over ours"].reached is None
    assert told["the same numbers as gpytorch"] == (
        "the same numbers as gpytorch",
        "not installed",
        None,
    )
