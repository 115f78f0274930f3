"""Encoders or a kernel ridge regression on pixels: the smaller held-out error wins."""

from __future__ import annotations

import pytest
import torch

from kbf.data.windows import held_by
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.settings import EncodingSettings, read_encoding_settings
from kbf.images.pixel_ridge import best_settings, crossfit
from kbf.manifolds import FLAT
from kbf.recording import Recording
from kbf.training.fit import train
from kbf.training.pixel_choice import MAX_IMAGES, choose_pixels
from tests.images.test_pixel_ridge import encoding, spots

HOW = EncodingSettings(epochs=1, lr=0.1, members=2)


def recordings() -> list[Recording]:
    found = []
    for k, steps in enumerate((50, 30)):
        x, z = spots(steps, k)
        found.append(Recording(z, x))
    mask = torch.arange(30) % 5 > 0
    found[1] = found[1]._replace(mask=mask, obs=torch.where(mask[:, None, None, None], x, 0))
    return found


def encoded(noise: float) -> list[Recording]:
    """Encodings with errors of this standard deviation."""
    g = torch.Generator().manual_seed(5)
    return [
        each._replace(obs=each.states + noise * torch.randn(each.states.shape, generator=g))
        for each in recordings()
    ]


def held() -> list[torch.Tensor]:
    return held_by([len(each.states) for each in recordings()], 2)


def test_the_regression_replaces_poor_encoders():
    code, before = encoding(), encoded(0.5)
    found = choose_pixels(code, recordings(), held(), before, HOW)
    assert code.pixels.fitted
    whole, part = recordings()
    assert part.mask is not None
    x, z = (
        torch.cat([whole.obs, part.obs[part.mask]]),
        torch.cat([whole.states, part.states[part.mask]]),
    )
    chunk = torch.cat([held()[0], held()[1][part.mask]])
    expected = FLAT.project(crossfit(x, z, chunk, best_settings(x, z)))
    torch.testing.assert_close(torch.cat([found[0].obs, found[1].obs[part.mask]]), expected)
    torch.testing.assert_close(found[1].obs[~part.mask], before[1].obs[~part.mask])
    new, true = spots(40, 7)
    assert float((code(new) - true).square().mean() / true.var()) < 0.05


def test_good_encoders_stay():
    code, before = encoding(), encoded(0.01)
    assert choose_pixels(code, recordings(), held(), before, HOW) is before
    assert not code.pixels.fitted


@pytest.mark.parametrize(
    "how",
    [
        HOW._replace(pixel_ridge=False),
        HOW._replace(loss="ridge"),
        HOW._replace(loss="ratio"),
        HOW._replace(members=1),
    ],
)
def test_other_stages_are_not_compared(how):
    code, before = encoding(), encoded(0.5)
    assert choose_pixels(code, recordings(), held(), before, how) is before
    assert not code.pixels.fitted


def test_many_images_are_not_compared():
    z = torch.zeros(MAX_IMAGES + 1, 2, dtype=torch.float64)
    many = [Recording(z, torch.zeros(len(z), 1, 4, 4))]
    before = [Recording(z, z)]
    assert choose_pixels(encoding(), many, held_by([len(z)], 2), before, HOW) is before


def test_the_setting_is_true_or_false():
    with pytest.raises(ValueError, match=r"data.encoding.pixel_ridge must be true or false"):
        read_encoding_settings({"epochs": 1, "lr": 0.1, "pixel_ridge": "auto"})


def test_a_checkpoint_contains_the_regression(tmp_path):
    x, z = spots(60)
    encoder = {"_target_": "kbf.CNN", "q": [1, 32, 32], "features": 2, "channels": [2]}
    config = {
        "model": {
            "name": "kalman",
            "net": {"_target_": "kbf.LearnedKalman"},
            "training": None,
            "encoding": {"encoder": encoder, "epochs": 1, "lr": 1e-6, "members": 2},
        },
        "trainer": {
            "_target_": "lightning.Trainer",
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "seed": 0,
    }
    trained = train(config, [Recording(z, x)], tmp_path)
    assert trained is not None and trained.module.code.pixels.fitted
    new = spots(10, 1)[0]
    loaded = load_filter(tmp_path / "best.ckpt").filter
    torch.testing.assert_close(
        rollout(loaded, new[None]).estimates, rollout(trained.filter, new[None]).estimates
    )
