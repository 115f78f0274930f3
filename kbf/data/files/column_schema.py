"""Columns of a file, and the components that filters use for them.

Filters use angles as (cos, sin) and rotations as matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.embeddings import project_so3
from kbf.rkhs.linalg import varying
from kbf.runtime.errors import DataError

# Components that filters use, by kind of part.
WIDTH_OF_KIND = {"number": 1, "angle": 2, "rotation": 9}


class Part(NamedTuple):
    """Columns that belong together: a number, an angle, or a rotation.

    A rotation is a quaternion w x y z, or 9 entries of a matrix, by rows.
    """

    kind: str
    names: tuple[str, ...]

    def components(self) -> list[str]:
        """Returns the names of the components that filters use."""
        if self.kind == "angle":
            return [f"cos {self.names[0]}", f"sin {self.names[0]}"]
        if len(self.names) == WIDTH_OF_KIND[self.kind]:
            return list(self.names)
        return [f"R{i}{j}" for i in (1, 2, 3) for j in (1, 2, 3)]


class ColumnSchema(NamedTuple):
    """Names and kinds of the columns of states, observations and controls; part of checkpoints.

    Attributes:
        states: parts of the state. observations: parts of the observation, none for images.
            controls: names of numbers.
        unit: of angles in the file, radians or degrees.
        sensors: names of sensors, and the columns of the observations that each has, which are
            missing together.
    """

    states: tuple[Part, ...]
    observations: tuple[Part, ...]
    controls: tuple[str, ...] = ()
    unit: str = "radians"
    sensors: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ColumnSchema:
        """Returns the schema that `to_dict` converted."""
        states, obs = (
            tuple(Part(kind, tuple(names)) for kind, names in values[side])
            for side in ("states", "observations")
        )
        sensors = ((name, tuple(columns)) for name, columns in values.get("sensors", {}).items())
        controls = tuple(values["controls"])
        return ColumnSchema(states, obs, controls, values["unit"], tuple(sensors))

    @staticmethod
    def unnamed(d: int, q: int, k: int) -> ColumnSchema:
        """Returns d states z_0, z_1, ..., q observations x_0, ... and k controls u_0, ..."""
        states, observations = (
            tuple(Part("number", (f"{letter}_{i}",)) for i in range(n))
            for letter, n in (("z", d), ("x", q))
        )
        return ColumnSchema(states, observations, tuple(f"u_{i}" for i in range(k)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the schema as dicts, lists and strings, for a configuration."""
        sides = {
            side: [[part.kind, list(part.names)] for part in getattr(self, side)]
            for side in ("states", "observations")
        }
        found = {**sides, "controls": list(self.controls), "unit": self.unit}
        sensors = {name: list(columns) for name, columns in self.sensors}
        return found | ({"sensors": sensors} if sensors else {})

    def columns(self, side: str) -> list[str]:
        """Returns the column names of the file of one side: states or observations."""
        return [name for part in getattr(self, side) for name in part.names]

    def sides(self) -> dict[str, list[str]]:
        """Returns the column names of the file of states, observations and controls."""
        columns = {side: self.columns(side) for side in ("states", "observations")}
        return {**columns, "controls": list(self.controls)}

    def components(self, side: str) -> list[str]:
        """Returns the names of the components that filters use."""
        return [name for part in getattr(self, side) for name in part.components()]

    def widths(self) -> list[int]:
        """Returns the number of components of each part of the states."""
        return [WIDTH_OF_KIND[part.kind] for part in self.states]

    def parts(self) -> list[str]:
        """Returns a name for each part of the states: its column, or ``rotationK``."""
        return [
            part.names[0] if len(part.names) == 1 else f"rotation{k + 1}"
            for k, part in enumerate(self.states)
        ]

    def turn(self) -> float:
        """Returns the unit of angles in the file, as a factor of radians."""
        return 180 / math.pi if self.unit == "degrees" else 1.0

    def scalable(self, side: str) -> list[bool]:
        """Returns for each component whether it may be scaled; angles and rotations may not."""
        return [
            part.kind == "number"
            for part in getattr(self, side)
            for _ in range(WIDTH_OF_KIND[part.kind])
        ]

    def encode(self, values: Float[Tensor, "T c"], side: str = "states") -> Float[Tensor, "T d"]:
        """Converts columns in the order of `columns` to components; NaN stays NaN.

        A sensor that lacks one of its columns is missing as a whole.

        Raises:
            ValueError: a quaternion of norm 0, or 9 numbers that are not a rotation (to 1 %), with
                the row.
        """
        parts = getattr(self, side)
        if side == "observations":
            values = self.without_incomplete_sensors(values)
        blocks = values.split([len(part.names) for part in parts], 1)
        pieces = [encode_part(*each, self.unit) for each in zip(parts, blocks, strict=True)]
        return torch.cat(pieces, 1) if pieces else values.new_zeros(len(values), 0)

    def without_incomplete_sensors(self, obs: Float[Tensor, "T c"]) -> Float[Tensor, "T c"]:
        """Returns observations with NaN in all columns of sensors that lack one of them."""
        names = self.columns("observations")
        for _, columns in self.sensors:
            own = torch.tensor([name in columns for name in names], device=obs.device)
            incomplete = obs[:, own].isnan().any(1, keepdim=True)
            obs = obs.masked_fill(incomplete & own, torch.nan)
        return obs

    def by_column(self, values: Any) -> Any:
        """Returns a mapping with the columns of sensors in place of their names.

        A sensor is given by its numbers in the order of its columns (one of a single column also
        as a number), by a mapping of its columns, or by None. Values that are no mapping are
        returned as they are.

        Raises:
            DataError: another number of values than the sensor has columns, or other columns.
        """
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        for sensor, columns in self.sensors:
            if sensor in found and sensor not in columns:
                found |= readings_of(sensor, columns, found.pop(sensor))
        return found

    def decode(
        self, estimates: Float[Tensor, "T d"], covariances: Float[Tensor, "T d d"] | None = None
    ) -> dict[str, Float[Tensor, " T"]]:
        """Converts estimates to columns by name, and to columns NAME_std if covariances are given.

        The standard deviation of a number is the root of its variance. An angle is atan2 of its
        pair; with R the length of the mean pair and C its covariance its circular standard
        deviation is sqrt(-ln(R^2 / (R^2 + tr C))), as in directional statistics, since R^2 + tr C
        = 1 for points on the circle. A rotation is the nearest one
        (`kbf.rkhs.embeddings.project_so3`), with the standard deviation of its rotation angle for
        all its columns: sqrt(tr C / 2), since ||A - B||^2 is about twice the square of the angle
        between A and B.

        References: Mardia and Jupp (2000), section 2.3.
        """
        decoded: dict[str, Tensor] = {}
        C = torch.zeros_like(estimates).diag_embed() if covariances is None else covariances
        variances = C.diagonal(dim1=-2, dim2=-1)
        widths = self.widths()
        blocks = zip(
            self.states, estimates.split(widths, 1), variances.split(widths, 1), strict=True
        )
        names, turn = self.parts(), self.turn()
        for k, (part, mean, variance) in enumerate(blocks):
            total = variance.sum(-1).clamp_min(0)
            if part.kind == "number":
                values, std = mean, total.sqrt()
            elif part.kind == "angle":
                values = torch.atan2(mean[:, 1:], mean[:, :1]) * turn
                std = (1 + total / mean.square().sum(-1)).log().sqrt() * turn
            else:
                rotation = nearest_rotation(mean.reshape(-1, 3, 3))
                values = rotation.flatten(1) if len(part.names) == 9 else to_quaternion(rotation)
                std = (total / 2).sqrt() * turn
            decoded |= dict(zip(part.names, values.unbind(1), strict=True))
            if covariances is not None:
                decoded[f"{names[k]}_std"] = std
        return decoded

    def errors(
        self, states: Float[Tensor, "T d"], estimates: Float[Tensor, "T d"]
    ) -> Float[Tensor, "T c"]:
        """Returns the errors of the parts of the states, in the units of the columns.

        That of an angle is the shortest turn, in (-pi, pi]; that of a rotation the angle of the
        rotation between the two, from ||A - B||_F = 2 sqrt(2) sin(angle / 2).
        """
        truth, found, errors, at = self.decode(states), self.decode(estimates), [], 0
        for part in self.states:
            inside = slice(at, at + WIDTH_OF_KIND[part.kind])
            at = inside.stop
            if part.kind == "rotation":
                pair = (each[:, inside].reshape(-1, 3, 3) for each in (states, estimates))
                A, B = (nearest_rotation(each) for each in pair)
                half = ((A - B).flatten(1).norm(dim=1) / math.sqrt(8)).clamp(max=1).asin()
                errors.append(2 * half * self.turn())
                continue
            error = found[part.names[0]] - truth[part.names[0]]
            if part.kind == "angle":
                radians = error / self.turn()
                error = torch.atan2(radians.sin(), radians.cos()) * self.turn()
            errors.append(error)
        return torch.stack(errors, 1)

    def scores(
        self, states: Float[Tensor, "T d"], estimates: Float[Tensor, "T d"]
    ) -> tuple[Float[Tensor, "T c"], Float[Tensor, " c"], Float[Tensor, " c"]]:
        """Returns the `errors`, and for each part the RMSE and the NMSE.

        The NMSE is the mean squared error over that of the constant estimate, the mean state; NaN
        for a part that never varies.
        """
        errors = self.errors(states, estimates)
        spread = self.errors(states, states.mean(0).expand_as(states))
        squared, varies = errors.square().mean(0), varying(states).split(self.widths())
        nmse = squared / spread.square().mean(0)
        return (
            errors,
            squared.sqrt(),
            torch.where(torch.stack([part.any() for part in varies]), nmse, torch.nan),
        )


def column_schema_of(
    states: list[str],
    observations: list[str],
    controls: list[str],
    angles: list[str],
    rotations: list[list[str]],
    unit: str = "radians",
    sensors: Mapping[str, Sequence[str]] | None = None,
) -> ColumnSchema:
    """Returns the schema of columns whose angles and rotations a configuration declares.

    Raises:
        ValueError: a declared name that is missing or repeated, or a rotation with a wrong number
            of columns; or as `check_output_names` and `sensors_of`.
    """
    if unit not in ("radians", "degrees"):
        raise ValueError(f"data.angle_unit must be radians or degrees, got {unit!r}")
    for side, names in (("states", states), ("observations", observations), ("controls", controls)):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"data.{side} names {repeated[0]!r} twice")
    check_output_names(states)
    declared = [*angles, *(name for group in rotations for name in group)]
    if repeated := [name for name, count in Counter(declared).items() if count > 1]:
        raise ValueError(f"{repeated[0]!r} is declared twice among data.angles and data.rotations")
    for group in rotations:
        if len(group) not in (4, 9):
            raise ValueError(
                "data.rotations: a rotation has 4 columns (quaternion w x y z) "
                f"or 9 (matrix, by rows), got {group}"
            )
        if not any(set(group) <= set(names) for names in (states, observations)):
            raise ValueError(
                f"data.rotations: {group} must all be among data.states "
                "or all among data.observations"
            )
    if unknown := [name for name in angles if name not in (*states, *observations)]:
        raise ValueError(
            f"data.angles: {unknown[0]!r} is neither among the states {states} "
            f"nor the observations {observations}"
        )
    return ColumnSchema(
        parts_of(states, angles, rotations),
        parts_of(observations, angles, rotations),
        tuple(controls),
        unit,
        sensors_of(sensors or {}, observations),
    )


def check_output_names(states: list[str]) -> None:
    """Raises a ValueError for a state with the name of another column of the estimates."""
    taken = {"alarm", *(f"{name}_{end}" for name in states for end in ("std", "lower", "upper"))}
    if repeated := [name for name in states if name in taken]:
        raise ValueError(
            f"data.states: the estimates have a column {repeated[0]!r} of their own, as NAME_std, "
            "NAME_lower and NAME_upper of each state, and alarm: rename this column of the data"
        )


def sensors_of(
    sensors: Mapping[str, Sequence[str]], observations: list[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the columns of each sensor, which may be given by patterns.

    The name of a column stands for that column alone, even if it is a pattern, as ``s[0]``.

    Raises:
        ValueError: a sensor without columns, or a column of two sensors.
    """
    found, owner = [], dict[str, str]()
    for sensor, patterns in sensors.items():
        globs = {*patterns} - {*observations}
        matched = {*patterns, *(n for n in observations for p in globs if fnmatchcase(n, p))}
        columns = [name for name in observations if name in matched]
        if not columns:
            raise ValueError(
                f"data.sensors: no observation is {', '.join(patterns)}, of the sensor {sensor!r}"
            )
        if shared := [name for name in columns if name in owner]:
            raise ValueError(
                f"data.sensors: {shared[0]!r} is a column of {owner[shared[0]]!r} and {sensor!r}"
            )
        owner |= dict.fromkeys(columns, sensor)
        found.append((sensor, tuple(columns)))
    return tuple(found)


def readings_of(sensor: str, columns: tuple[str, ...], given: Any) -> dict[str, Any]:
    """Returns the readings of a sensor by column, as `ColumnSchema.by_column`."""
    if given is None:
        return dict.fromkeys(columns)
    given = given.to_dict() if hasattr(given, "to_dict") else given
    several = isinstance(given, Iterable) and getattr(given, "ndim", 1) > 0
    numbers = list(given) if several and not isinstance(given, str) else [given]
    if isinstance(given, Mapping) and given.keys() == {*columns}:
        return dict(given)
    if isinstance(given, Mapping) or len(numbers) != len(columns):
        names, got = (", ".join(map(str, each)) for each in (columns, numbers))
        got = got if isinstance(given, Mapping) else len(numbers)
        raise DataError(f"{sensor} must be {len(columns)} numbers ({names}), got {got}")
    return dict(zip(columns, numbers, strict=True))


def parts_of(names: list[str], angles: list[str], rotations: list[list[str]]) -> tuple[Part, ...]:
    """Groups columns into parts, in their order; a rotation takes the place of its first column."""
    first = {group[0]: tuple(group) for group in rotations}
    rest = {name for group in rotations for name in group[1:]}
    return tuple(
        Part("rotation", first[name])
        if name in first
        else Part("angle" if name in angles else "number", (name,))
        for name in names
        if name not in rest
    )


def encode_part(part: Part, block: Tensor, unit: str) -> Tensor:
    """Converts the columns ``T c`` of one part to components."""
    if part.kind == "number":
        return block
    if part.kind == "angle":
        angle = torch.deg2rad(block) if unit == "degrees" else block
        return torch.cat([angle.cos(), angle.sin()], 1)
    if len(part.names) == 4:
        norm = block.norm(dim=1, keepdim=True)
        if bool((norm == 0).any()):
            raise ValueError(
                f"{', '.join(part.names)}: the quaternion of row "
                f"{int((norm == 0).nonzero()[0, 0])} has norm 0"
            )
        return from_quaternion(block).flatten(1)
    matrices = block.reshape(-1, 3, 3)
    off = (matrices @ matrices.mT - torch.eye(3).to(block)).abs().flatten(1).amax(1)
    wrong = (off > 0.01) | (torch.linalg.det(matrices.nan_to_num()) < 0) & off.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"{part.names[0]} ... {part.names[-1]}: the 9 numbers of row "
            f"{int(wrong.nonzero()[0, 0])} are no rotation"
        )
    return block


def from_quaternion(q: Float[Tensor, "T 4"]) -> Float[Tensor, "T 3 3"]:
    """Returns rotation matrices of quaternions w x y z; NaN for NaN."""
    from scipy.spatial.transform import Rotation

    known = q.isfinite().all(1)
    matrices = q.new_full((len(q), 3, 3), math.nan)
    matrices[known] = torch.from_numpy(
        Rotation.from_quat(q[known].roll(-1, 1).double().numpy()).as_matrix()
    ).to(q)
    return matrices


def to_quaternion(rotation: Float[Tensor, "T 3 3"]) -> Float[Tensor, "T 4"]:
    """Returns unit quaternions w x y z, with w >= 0."""
    from scipy.spatial.transform import Rotation

    quaternions = Rotation.from_matrix(rotation.double().numpy()).as_quat()
    q = torch.from_numpy(quaternions).roll(1, 1).to(rotation)
    return torch.where(q[:, :1] < 0, -q, q)


def nearest_rotation(matrices: Float[Tensor, "T 3 3"]) -> Float[Tensor, "T 3 3"]:
    """Returns the nearest rotation of each matrix."""
    return torch.cat(
        [project_so3(torch.eye(len(part)).to(part), part) for part in matrices.split(256)]
    )
