"""A map with its matrices multiplied beforehand gives the numbers of the map, and draws
as it does.
"""

import pytest
import torch

from kbf.densities.fused_ridge import MergedMap
from kbf.densities.ridge import fit_ridge_map

F64 = torch.float64


def pairs(kind: str):
    u = torch.randn(300, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    noise = 0.1 * torch.randn(300, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    if kind == "circle":
        angle = u[:, 0] + noise[:, 0]
        return u, torch.stack([angle.cos(), angle.sin()], -1)
    return u, torch.stack([u[:, 0].sin(), u[:, 1] * u[:, 2]], -1) + noise


@pytest.mark.parametrize("kind", ["flat", "circle", "diagonal"])
def test_it_is_the_map(kind):
    u, y = pairs(kind)
    map = fit_ridge_map(u, y, rank=64, diagonal=kind == "diagonal")
    merged = MergedMap(map)
    new = 2 * torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(2), dtype=F64)
    for found, expected in zip(merged.predict(new), map.predict(new), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        merged.log_density(y[:7], new),
        map.log_density_given(y[:7], *map.predict(new)),
        rtol=1e-6,
        atol=1e-8,
    )
    same = [each.sample(new, torch.Generator().manual_seed(3)) for each in (merged, map)]
    torch.testing.assert_close(*same, rtol=1e-6, atol=1e-9)
    assert merged.sample(new.float()).dtype == torch.float32
