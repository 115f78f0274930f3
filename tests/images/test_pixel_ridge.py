"""Kernel ridge regression on averaged pixels: against the closed form, pooling and refits."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kbf.export.step import export
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.images.pixel_ridge import (
    PixelRidge,
    PixelSettings,
    averages,
    best_settings,
    crossfit,
)
from kbf.recording import Recording

F64 = torch.float64
SIDE = 32


def spots(n, seed=0, noise=0.05):
    """A bright spot; its place is the state."""
    g = torch.Generator().manual_seed(seed)
    z = 1.4 * torch.rand(n, 2, generator=g, dtype=F64) - 0.7
    grid = torch.linspace(-1, 1, SIDE, dtype=F64)
    near = (-20 * (grid - z[:, :, None]).square()).exp()
    x = near[:, 1, :, None] * near[:, 0, None, :]
    return (x + noise * torch.randn(x.shape, generator=g, dtype=F64)).float()[:, None], z


def test_averages_are_those_of_pooling():
    x = torch.randn(3, 2, 12, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = averages(12, 3) @ x @ averages(8, 4).mT
    torch.testing.assert_close(found, functional.avg_pool2d(x, (4, 2)))
    torch.testing.assert_close(averages(7, 3).sum(1), torch.ones(3, dtype=F64))
    torch.testing.assert_close(averages(7, 3).sum(0), torch.full((7,), 3 / 7, dtype=F64))
    assert torch.equal(averages(5, 5), torch.eye(5, dtype=F64))


def test_the_regression_is_the_closed_form():
    x, z = spots(40)
    new = spots(9, 1)[0]
    model = PixelRidge().fit(x, z, PixelSettings(8, 2.0, 1e-3, 0.0))
    u, v = (functional.avg_pool2d(each.double(), SIDE // 8).flatten(1) for each in (x, new))
    distances = torch.cdist(u, u)[torch.ones(40, 40).triu(1).bool()]
    width = 2.0 * distances.median()
    gram, across = (torch.exp(-torch.cdist(a, u).square() / (2 * width**2)) for a in (u, v))
    alpha = torch.linalg.solve(gram + 40 * 1e-3 * torch.eye(40, dtype=F64), z - z.mean(0))
    # the median of few distances is one of two neighbours
    torch.testing.assert_close(model.bandwidth, width, rtol=0.01, atol=0)
    torch.testing.assert_close(model(new), z.mean(0) + across @ alpha, rtol=0.02, atol=2e-3)


def test_the_settings_are_those_of_the_least_leave_one_out_error():
    x, z = spots(30)
    settings = best_settings(x, z)
    every = torch.arange(30)
    left = crossfit(x, z, every, settings) - z
    # bandwidth and ridge are relative to 29 images here
    assert settings.error == pytest.approx(float(left.square().sum(1).mean()), rel=0.3)
    assert settings.error < 0.25 * float((z - z.mean(0)).square().sum(1).mean())


def test_an_image_is_encoded_by_a_fit_without_its_chunk():
    x, z = spots(30)
    chunk = torch.arange(30) // 10
    settings = PixelSettings(16, 1.0, 1e-4, 0.0)
    other = z.clone()
    other[:10] += 5
    found, changed = (crossfit(x, each, chunk, settings) for each in (z, other))
    torch.testing.assert_close(changed[:10], found[:10])
    assert (changed[10:] - found[10:]).abs().amin() > 0


class Flat(nn.Module):
    """An encoder of one constant feature."""

    features = 1

    def forward(self, x):
        return torch.ones(len(x), 1)


def encoding():
    torch.manual_seed(0)
    return Encoding([Flat(), Flat()], 2)


def test_an_encoding_uses_it_once_it_is_fitted_and_keeps_it():
    x, z = spots(60)
    new, true = spots(50, 1)
    code = encoding()
    before = code(new)
    code.pixels.fit(x, z)
    found = code(new)
    assert (found - true).square().mean() < 0.05 * true.var() < (before - true).square().mean()
    again = encoding()
    again.load_state_dict(code.state_dict())
    assert torch.equal(again(new), found)
    again.load_state_dict(encoding().state_dict())  # of encoders
    assert torch.equal(again(new), before)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch_export", "onnx"])
def test_a_filter_of_its_encodings_is_exported(format, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    (x, z), code = spots(60), encoding().eval()
    code.pixels.fit(x, z)
    inner = LearnedKalman().fit([Recording(z, code(x).to(z))])
    filter = EncodedFilter(code, inner, F64)
    found = export(filter, tmp_path / "step", format, x[:12], z.std(0))
    assert max(found[:2]) < 1e-6


def test_encodings_of_earlier_versions_load():
    code, new = encoding(), spots(5)[0]
    stored = {name: leaf for name, leaf in code.state_dict().items() if "pixels" not in name}
    again = encoding()
    again.pixels.fit(*spots(20))
    again.load_state_dict(stored)
    assert torch.equal(again(new), code(new))
