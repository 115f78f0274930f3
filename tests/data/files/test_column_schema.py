"""Columns to states and back: angles, rotations, and what is known of their spread."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from kbf.data.files import ColumnSchema
from kbf.data.files.column_schema import column_schema_of


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


QUATERNION = ["qw", "qx", "qy", "qz"]


def mixed(unit="radians"):
    return column_schema_of(
        ["x", "theta", *QUATERNION], ["phi", "a"], ["u"], ["theta", "phi"], [QUATERNION], unit
    )


def test_a_boundary_is_plain_data():
    column_schema = mixed("degrees")
    assert ColumnSchema.from_dict(json.loads(json.dumps(column_schema.to_dict()))) == column_schema
    assert column_schema.columns("states") == ["x", "theta", *QUATERNION]
    assert column_schema.components("states")[:3] == ["x", "cos theta", "sin theta"]
    assert len(column_schema.components("states")) == 12
    assert column_schema.scalable("states") == [True] + [False] * 11
    assert column_schema.scalable("observations") == [False, False, True]


@pytest.mark.parametrize("unit", ["radians", "degrees"])
def test_there_and_back(unit):
    turn = math.pi / 180 if unit == "degrees" else 1.0
    angle = torch.linspace(-3.1, 3.1, 40).double() / turn
    rotations = Rotation.random(40, random_state=1)
    q = torch.from_numpy(rotations.as_quat()).roll(1, 1)
    q = torch.where(q[:, :1] < 0, -q, q)
    values = torch.cat(
        [torch.randn(40, 1, generator=generator()).double(), angle[:, None], 3 * q], 1
    )  # not of norm 1
    inside = mixed(unit).encode(values)
    torch.testing.assert_close(
        inside[:, 1:3], torch.stack([(angle * turn).cos(), (angle * turn).sin()], 1)
    )
    np.testing.assert_allclose(inside[:, 3:].reshape(-1, 3, 3), rotations.as_matrix(), atol=1e-12)
    found = mixed(unit).decode(inside)
    assert list(found) == ["x", "theta", *QUATERNION]
    torch.testing.assert_close(found["x"], values[:, 0])
    torch.testing.assert_close(found["theta"], angle)
    torch.testing.assert_close(torch.stack([found[name] for name in QUATERNION], 1), q)


def test_nan_stays_nan_and_hurts_nobody_else():
    values = torch.tensor([[1.0, 0.5, 1, 0, 0, 0], [2.0, math.nan, math.nan, 0, 0, 0]]).double()
    inside = mixed().encode(values)
    assert inside[0].isfinite().all()
    assert inside[1].isnan().tolist() == [False, True, True] + [True] * 9


def test_nine_entries_of_a_matrix():
    names = [f"r{k}" for k in range(9)]
    column_schema = column_schema_of(names, ["a"], [], [], [names])
    matrices = torch.from_numpy(Rotation.random(5, random_state=0).as_matrix()).flatten(1)
    torch.testing.assert_close(column_schema.encode(matrices), matrices)
    noisy = matrices + 0.05 * torch.randn(matrices.shape, generator=generator()).double()
    found = torch.stack(list(column_schema.decode(noisy).values()), 1).reshape(-1, 3, 3)
    torch.testing.assert_close(found @ found.mT, torch.eye(3).double().expand(5, 3, 3))
    assert (torch.linalg.det(found) > 0).all()
    assert ((found.flatten(1) - matrices).norm(dim=1) < 0.3).all()
    for broken in (2 * matrices, -matrices):
        with pytest.raises(ValueError, match=r"r0 ... r8: the 9 numbers of row 0 are no rotation"):
            column_schema.encode(broken)


@pytest.mark.parametrize("std", [0.05, 0.5, 1.2])
def test_the_circular_std_is_that_of_a_wrapped_normal(std):
    """Its mean pair has length exp(-sd^2 / 2), its covariance the rest; in degrees, the same in
    degrees.
    """
    angles = 2.0 + std * torch.randn(400_000, generator=generator(), dtype=torch.float64)
    pairs = torch.stack([angles.cos(), angles.sin()], 1)
    mean, spread = pairs.mean(0)[None], torch.cov(pairs.T)[None]
    for unit, turn in (("radians", 1.0), ("degrees", 180 / math.pi)):
        found = column_schema_of(["h"], ["a"], [], ["h"], [], unit).decode(mean, spread)
        assert found["h"].item() == pytest.approx(2.0 * turn, rel=5e-3)
        assert found["h_std"].item() == pytest.approx(std * turn, rel=5e-3)


def test_the_std_of_a_rotation_is_the_angle_of_turning():
    std = 0.1  # about each axis
    vectors = std * torch.randn(100_000, 3, generator=generator(), dtype=torch.float64)
    matrices = torch.from_numpy(
        (
            Rotation.from_euler("xyz", [0.3, -1.0, 2.0]) * Rotation.from_rotvec(vectors.numpy())
        ).as_matrix()
    )
    rows = matrices.flatten(1)
    found = column_schema_of(QUATERNION, ["a"], [], [], [QUATERNION]).decode(
        rows.mean(0)[None], torch.cov(rows.T)[None]
    )
    assert found["rotation1_std"].item() == pytest.approx(std * math.sqrt(3), rel=0.02)
    assert set(found) == {*QUATERNION, "rotation1_std"}


def test_numbers_have_the_root_of_their_variance():
    column_schema = column_schema_of(["x", "theta", "y"], ["a"], [], ["theta"], [])
    spread = torch.diag(torch.tensor([4.0, 0.1, 0.2, 9.0])).double()[None]
    found = column_schema.decode(torch.tensor([[1.0, 1.0, 0.0, 2.0]]).double(), spread)
    assert found["x_std"].item() == 2
    assert found["y_std"].item() == 3
    assert found["theta_std"].item() == pytest.approx(math.sqrt(math.log(1.3)))
    assert "x_std" not in column_schema.decode(torch.ones(1, 4).double())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"angles": ["nope"]}, "data.angles: 'nope' is neither"),
        ({"unit": "turns"}, "radians or degrees"),
        ({"states": ["x", "x"]}, "data.states names 'x' twice"),
        ({"rotations": [["x", "y"]]}, "has 4 columns"),
        ({"rotations": [["x", "y", "z", "a"]]}, "must all be among"),
        ({"angles": ["x"], "rotations": [["x", "y", "z", "w"]]}, "declared twice"),
    ],
)
def test_declarations_that_cannot_be(changes, message):
    settings = {
        "states": ["x", "y", "z", "w"],
        "observations": ["a"],
        "controls": [],
        "angles": [],
        "rotations": [],
    }
    with pytest.raises(ValueError, match=message):
        column_schema_of(**{**settings, **changes})


def test_a_quaternion_of_norm_0_is_told():
    values = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0]]).double()
    with pytest.raises(ValueError, match=r"qw, qx, qy, qz: the quaternion of row 1 has norm 0"):
        column_schema_of(QUATERNION, ["a"], [], [], [QUATERNION]).encode(values)
