"""Maps beyond the points that they were fitted to."""

import torch

from kbf.filters.gaussian.learned_maps import fit_map


def test_a_map_has_no_edge_at_its_outermost_points_and_is_bounded_far_away():
    """y = u^3: a tenth of the range beyond the points the slope goes on, at 100 it is linear."""
    u = torch.linspace(-1, 1, 400, dtype=torch.float64)[:, None]
    for kind, limit in (("kernel", 2.0), ("both", 100.0)):
        found = fit_map(kind, u, u**3, precise=True)
        for place, error in ((1.05, 0.02), (-1.05, 0.02), (1.15, 0.1)):  # at the border .16 and .52
            near = torch.tensor([[place]], dtype=torch.float64)
            torch.testing.assert_close(found(near), near**3, rtol=0, atol=error)
        assert found(torch.full((1, 1), 100.0, dtype=torch.float64)).abs().item() < limit
