"""Codes of images: who codes what, where codes live, and a filter of codes as a filter
of images.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kbf.data.windows import held_by
from kbf.densities.ratio import RatioDensity, StateDensity, encoding_width, read_encoding
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman
from kbf.filters.protocols import where
from kbf.filters.rollout import rollout, step
from kbf.fitted.model import build_encoding
from kbf.images.encoders import CNN
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.manifolds import CIRCLE, FLAT
from kbf.recording import Recording

SHAPE = (1, 4, 4)


class Constant(nn.Module):
    """An encoder whose one feature is always the same: its code tells which member made it."""

    features = 1

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x), 1), self.value)


def telling(*values: float, d: int = 2) -> Encoding:
    """Member k says values[k] in every component."""
    code = Encoding([Constant(value) for value in values], d)
    for head in code.heads:
        nn.init.ones_(head.weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(head.bias)  # pyright: ignore[reportArgumentType]
    return code


def images(steps: int, seed: int = 0) -> Tensor:
    return torch.rand(steps, *SHAPE, generator=torch.Generator().manual_seed(seed))


def states(steps: int) -> Tensor:
    return torch.randn(steps, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def small_code(members: int = 2) -> Encoding:
    torch.manual_seed(0)
    code = Encoding(
        [CNN(SHAPE, features=3, channels=(4,), norm="batch", dropout=0.5) for _ in range(members)],
        2,
    )
    code.prepare(states(20))
    return code.eval()


def test_each_step_is_coded_by_the_member_that_has_not_seen_it():
    held = torch.tensor([2, 2, 0, 0, 0, 1])
    mask = torch.tensor([True, True, False, True, True, True])
    encoded = telling(10.0, 20.0, 30.0).crossfit(
        Recording(states(6), images(6), mask), held, batch_size=2
    )
    assert encoded.obs.tolist() == [[v, v] for v in (30.0, 30.0, 10.0, 10.0, 10.0, 20.0)]
    assert encoded.obs.dtype == torch.float64
    assert torch.equal(encoded.states, states(6))
    assert encoded.mask is mask


def test_new_images_get_the_mean():
    assert telling(10.0, 20.0, 36.0)(images(3)).tolist() == [[22.0, 22.0]] * 3


def test_codes_are_scaled_like_states_and_live_where_they_do():
    code, z = telling(3.0), 5 * states(30) + torch.tensor([7.0, -1.0])
    code.prepare(z)
    assert code.manifold == FLAT
    expected = z.mean(0) + 3 * z.var(0, correction=0).mean().sqrt()
    torch.testing.assert_close(code(images(2))[0], expected.float())
    circle = torch.nn.functional.normalize(states(30), dim=-1)
    two = telling(3.0, -2.0)
    two.prepare(circle)
    assert two.manifold == CIRCLE
    raw = torch.stack([two.member(k, images(2)) for k in range(2)])
    assert not torch.allclose(raw.norm(dim=-1), torch.ones(2, 2))
    torch.testing.assert_close(two(images(2)), torch.nn.functional.normalize(raw.mean(0), dim=-1))
    encoded = two.crossfit(Recording(circle[:4], images(4)), torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(encoded.obs.norm(dim=-1), torch.ones(4, dtype=torch.float64))


def test_states_that_do_not_vary_give_a_finite_code():
    code = telling(1.0)
    code.prepare(torch.ones(5, 2))
    assert torch.isfinite(code(images(2))).all()


def test_whole_numbers_are_pixels():
    """uint8 images, those over 255, and these in double precision have one code; also through an
    encoder that is not ours.
    """
    whole = (255 * images(5)).to(torch.uint8)
    foreign = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    foreign.features = 3  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    for code in (small_code(), Encoding([foreign], 2)):
        torch.testing.assert_close(code(whole), code(whole.float() / 255))
        torch.testing.assert_close(code(whole), code(whole.double() / 255))
        held = torch.zeros(5, dtype=torch.long)
        a, b = (
            code.crossfit(Recording(states(5), x), held).obs for x in (whole, whole.float() / 255)
        )
        torch.testing.assert_close(a, b)


def test_codes_are_made_in_eval_mode():
    code = small_code()
    expected = code.crossfit(Recording(states(9), images(9)), torch.tensor([0] * 4 + [1] * 5)).obs
    code.train()
    found = code.crossfit(Recording(states(9), images(9)), torch.tensor([0] * 4 + [1] * 5)).obs
    assert torch.equal(found, expected)
    torch.testing.assert_close(found[4:].float(), code.member(1, images(9)[4:]))


def test_chunks_are_contiguous_and_even():
    held = held_by([7, 4, 9], 4)
    assert [len(h) for h in held] == [7, 4, 9]
    together = torch.cat(held).tolist()
    assert together == sorted(together)
    assert torch.cat(held).bincount().tolist() == [5, 5, 5, 5]
    assert all((h == 0).all() for h in held_by([3, 5], 1))
    with pytest.raises(ValueError, match="5 training steps cannot be cut into 6"):
        held_by([2, 3], 6)


def coded_filter() -> tuple[EncodedFilter, KalmanFilter]:
    code = small_code()
    sequence = Recording(states(20), images(20))
    encoded = code.crossfit(sequence, held_by([20], 2)[0])
    inner = LearnedKalman().fit(encoded)
    return EncodedFilter(code, inner, torch.float64).eval(), inner


def test_a_filter_of_images_is_the_inner_filter_of_codes():
    filter, inner = coded_filter()
    x = images(12, seed=5).unflatten(0, (2, 6))
    encodings = filter.code(x.flatten(0, 1)).double().unflatten(0, (2, 6))
    found, truth = rollout(filter, x), rollout(inner, encodings)
    torch.testing.assert_close(found.estimates, truth.estimates)
    assert found.diagnostics.keys() == truth.diagnostics.keys()
    assert type(found.state) is type(truth.state)


def test_the_contract():
    """The state law, batch = one by one, a masked step is the prediction whatever is in its image,
    and pure methods.
    """
    filter, inner = coded_filter()
    x = images(12, seed=5).unflatten(0, (3, 4))
    assert all(leaf.shape[0] == 3 for leaf in filter.init(3))
    whole = rollout(filter, x).estimates
    each = torch.cat([rollout(filter, x[k : k + 1]).estimates for k in range(3)])
    torch.testing.assert_close(whole, each)
    mask = torch.tensor([[True, False, True, False]] * 3)
    spoiled = torch.where(mask[..., None, None, None], x, torch.nan)
    torch.testing.assert_close(
        rollout(filter, spoiled, mask=mask).estimates, rollout(filter, x, mask=mask).estimates
    )
    state = filter.init(3)
    before = copy.deepcopy(state)
    moved = filter.predict(state)
    masked = step(filter, state, x[:, 0], mask=torch.tensor([True, False, True]))
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    torch.testing.assert_close(filter.estimate(masked)[1], filter.estimate(moved)[1])
    pick = where(torch.tensor([True, False, True]), filter.update(moved, x[:, 0]), moved)
    torch.testing.assert_close(filter.estimate(masked), filter.estimate(pick))
    torch.testing.assert_close(
        rollout(filter, x[:, 2:], state=rollout(filter, x[:, :2]).state).estimates, whole[:, 2:]
    )


def test_an_encoder_must_say_how_wide_it_is():
    with pytest.raises(ValueError, match="the encoder Flatten needs an attribute 'features'"):
        build_encoding([nn.Flatten()], 2)


class Looking(nn.Module):
    """An encoder that sees a point of the plane."""

    features = 2

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def test_encodings_with_components_are_ratios_of_each_member_and_of_all():
    """Rows of one width, whoever made them; the mean in front is what the ratio integrates to."""
    torch.manual_seed(0)
    z = torch.randn(300, 2)
    code = Encoding([Looking(), Looking()], 2, components=2)
    code.prepare(z)
    assert code.manifold == FLAT
    x = torch.randn(6, 2, 1, 1)
    said = [code.output(k, x) for k in range(2)]
    crossed = code.crossfit(Recording(z[:6], x), torch.arange(6) % 2).obs
    assert crossed.shape == (6, encoding_width(2, 4))
    density = RatioDensity(StateDensity(code.points, code.width))
    for k in range(2):
        torch.testing.assert_close(
            density.log_density(crossed[k::2], z[k:6:2]),
            code.density.log_density(code.row(said[k]), z[:6])[k::2],
            atol=1e-4,
            rtol=1e-4,
        )
        torch.testing.assert_close(crossed[k::2, :2], code.member(k, x)[k::2])
        ratio = read_encoding(code.row(said[k]), 2)
        shares = ratio.log_shares.exp()
        mean = shares[:, :1] * code.z_mean + (shares[:, 1:, None] * ratio.centres).sum(1)
        torch.testing.assert_close(code.member(k, x), mean)
    assert code(x).shape == (6, 2)
    code.returns_ratio = True
    together = torch.stack(
        [code.density.log_density(code.row(each), z[:6]).exp() for each in said]
    ).mean(0)
    torch.testing.assert_close(
        density.log_density(code(x), z[:6]).exp(), together, atol=1e-4, rtol=1e-3
    )
