"""Pictures of frames with states: what is drawn where, and files that are whole or absent."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Wedge
from matplotlib.quiver import Quiver
from PIL import Image

from kbf.plots import tracks
from kbf.plots.animation import animate
from kbf.plots.frames import frame_grid, picture, state_kind
from kbf.plots.tracks import ESTIMATE, TRUTH, track_figure
from kbf.recording import Recording
from kbf.training.figure_logging import embedding_table, thumbnails

T = 5


def headings(mask: bool = False) -> Recording:
    angle = 0.4 * torch.arange(T)
    frames = torch.randint(
        256, (T, 3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Recording(
        torch.stack([angle.cos(), angle.sin()], -1), frames, torch.arange(T) != 2 if mask else None
    )


def states(d: int) -> Recording:
    generator = torch.Generator().manual_seed(1)
    return Recording(
        torch.randn(T, d, generator=generator),
        torch.rand(T, 1, 6, 6, generator=generator) * 1.4 - 0.2,
    )


def vectors(d: int, q: int | None = None) -> Recording:
    z = states(d).states
    x = z + 0.1 if q is None else torch.zeros(T, q)
    return Recording(z, x, torch.arange(T) != 1)


def covariance(d: int) -> torch.Tensor:
    return (0.04 * torch.eye(d)).expand(T, d, d)


def dots(axes, color: str):
    return next(
        line.get_xydata()
        for line in axes.lines
        if line.get_color() == color and line.get_marker() == "o"
    )


def compasses(figure: Figure):
    return [axes.child_axes[0] for axes in figure.axes]


def test_what_fits_the_states():
    assert (
        state_kind(headings().states) == "compass" and state_kind(headings().states, "map") == "map"
    )
    assert (
        state_kind(states(2).states) == "map"
        and [state_kind(states(d).states) for d in (1, 3)] == ["rows"] * 2
    )
    with pytest.raises(ValueError, match="compass, map, rows"):
        state_kind(states(2).states, "bars")
    with pytest.raises(ValueError, match="2 components, these have 3"):
        state_kind(states(3).states, "map")


def test_compass_grid():
    data, turn = (
        headings(mask=True),
        torch.tensor([[0.0, -0.5], [0.5, 0.0]]),
    )  # half as long, a quarter to the left
    figure = frame_grid(data, data.states @ turn.mT, covariance(2), steps=4, columns=3)
    assert (
        len(figure.axes) == 4
        and [axes.get_title() for axes in figure.axes][2] == "$t$ = 2 (not seen)"
    )
    assert [axes.images[0].get_alpha() for axes in figure.axes] == [1, 1, 0.15, 1]
    for t, axes in enumerate(compasses(figure)):
        truth, found = (a for a in axes.collections if isinstance(a, Quiver))
        assert [truth.U[0], truth.V[0]] == pytest.approx(data.states[t].tolist())
        assert [found.U[0], found.V[0]] == pytest.approx(
            [-0.5 * data.states[t, 1].item(), 0.5 * data.states[t, 0].item()]
        )
        wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
        middle = math.degrees(0.4 * t) + 90
        for k, wedge in enumerate(wedges, 1):  # sd 0.2 across an arrow of length 0.5
            assert (wedge.theta1, wedge.theta2) == pytest.approx(
                (middle - math.degrees(0.4 * k), middle + math.degrees(0.4 * k))
            )
    assert len(figure.legends[0].get_texts()) == 3


def test_map_grid_beside_and_in_the_picture():
    data, turn = states(2), torch.tensor([[0.75**0.5, -0.5], [0.5, 0.75**0.5]])  # by 30 degrees
    C = (turn @ torch.tensor([0.25, 0.01]).diag() @ turn.mT).expand(T, 2, 2)
    beside = frame_grid(data, data.states + 0.3, C, columns=2)
    assert len(beside.axes) == 2 * T and len(beside.legends[0].get_texts()) == 3
    inside = frame_grid(data, data.states + 0.3, C, extent=(-3.0, 3.0, 3.0, -3.0))
    assert (
        len(inside.axes) == T
        and inside.axes[0].get_xlim() == (-3, 3)
        and inside.axes[0].get_ylim() == (3, -3)
    )
    for t in range(T):
        for axes in (beside.axes[2 * t + 1], inside.axes[t]):
            assert dots(axes, TRUTH)[0] == pytest.approx(data.states[t].tolist())
            assert dots(axes, ESTIMATE)[0] == pytest.approx((data.states[t] + 0.3).tolist())
            small, large = (patch for patch in axes.patches if isinstance(patch, Ellipse))
            assert (small.width, small.height, large.width) == pytest.approx((1.0, 0.2, 2.0))
            assert small.angle % 180 == pytest.approx(
                30, abs=0.01
            ) and small.center == pytest.approx((data.states[t] + 0.3).tolist())
    for axes in beside.axes[1::2]:  # equal units, all states in view
        assert all(
            low < v < high
            for v, (low, high) in zip(
                dots(axes, TRUTH)[0], (axes.get_xlim(), axes.get_ylim()), strict=True
            )
        )


@pytest.mark.parametrize("d", [1, 2, 3, 8])
def test_rows_grid(d):
    data = states(d)
    figure = frame_grid(data, data.states, covariance(d), columns=3, kind="rows")
    assert len(figure.axes) == 2 * T
    for t, axes in enumerate(figure.axes[1::2]):
        assert dots(axes, TRUTH)[:, 0] == pytest.approx(data.states[t, :6].tolist())
        bars = axes.collections[-1].get_segments()
        assert bars[0][:, 0] == pytest.approx(
            [float(data.states[t, 0]) - 0.2, float(data.states[t, 0]) + 0.2]
        )


@pytest.mark.parametrize("kind", ["compass", "map", "rows"])
def test_an_estimate_equal_to_the_truth_is_the_same_point(kind):
    data = headings()
    figure = frame_grid(data, data.states, kind=kind)
    assert len(figure.legends[0].get_texts()) == 2
    if kind == "compass":
        for axes in compasses(figure):
            truth, found = (a for a in axes.collections if isinstance(a, Quiver))
            assert (truth.U, truth.V) == (found.U, found.V)
    else:
        for axes in figure.axes[1::2]:
            assert (dots(axes, TRUTH) == dots(axes, ESTIMATE)).all()


@pytest.mark.slow
@pytest.mark.parametrize("data", [headings(), states(2), states(3)], ids=["compass", "map", "rows"])
def test_a_filter_that_broke_down_is_drawn_as_far_as_it_goes(data, tmp_path):
    found, C = data.states.clone(), covariance(data.states.shape[1]).clone()
    found[2], C[2], C[3] = (
        torch.nan,
        torch.nan,
        -C[3],
    )  # negative weights may give a negative variance
    tracks.save(frame_grid(data, found, C), tmp_path / "grid.png")
    animate(tmp_path / "film.gif", data, found, C, steps=4)
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_the_data_alone_and_other_names():
    data = states(2)
    figure = frame_grid(data, extent=(-3.0, 3.0, 3.0, -3.0))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["true position"]
    assert all(
        dots(axes, TRUTH)[0] == pytest.approx(z.tolist())
        for axes, z in zip(figure.axes, data.states, strict=True)
    )
    named = frame_grid(data, data.states, names=list("abcde"), called="code")
    assert [axes.get_title() for axes in named.axes[::2]] == list("abcde")
    assert named.legends[0].get_texts()[1].get_text() == "code"


def test_a_track_with_bands():
    data = vectors(2)
    figure = track_figure(data, data.states, covariance(2))
    for k, axes in enumerate(figure.axes[:2]):
        one, two = (band.get_paths()[0].vertices[:, 1] for band in axes.collections)
        assert one.max() == pytest.approx(data.states[:, k].max().item() + 0.2)
        assert two.min() == pytest.approx(data.states[:, k].min().item() - 0.4)
    assert len(figure.legends[0].get_texts()) == 4


def test_pictures_of_all_kinds_of_frames():
    byte = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1)
    assert picture(byte).flatten().tolist() == [0, 0.2, 1] and picture(byte).shape == (1, 1, 3)
    assert picture(torch.tensor([[[-0.5, 0.25, 1.5, math.nan]]])).tolist() == [[0, 0.25, 1, 0.5]]
    assert picture(torch.rand(4, 2, 3)).shape == (2, 3)


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"frames are .* these observations are \(3,\)"):
        frame_grid(vectors(2, q=3))
    with pytest.raises(ValueError, match="no step"):
        frame_grid(states(2), states(2).states, steps=0)
    with pytest.raises(ValueError, match=r"\.gif, not film\.mp4"):
        animate("film.mp4", states(2), states(2).states)


@pytest.mark.parametrize(
    ("data", "extent"),
    [
        (headings(mask=True), None),
        (states(2), None),
        (states(2), (-3.0, 3.0, 3.0, -3.0)),
        (states(1), None),
        (states(5), None),
        (vectors(2), None),
        (vectors(1), None),
        (vectors(3, q=5), None),
    ],
    ids=["compass", "map", "overlay", "line", "five", "plane", "number", "unlike"],
)
def test_animation(data, extent, tmp_path):
    path = tmp_path / "film.gif"
    animate(
        path,
        data,
        data.states,
        covariance(data.states.shape[1]),
        fps=10,
        steps=3,
        extent=extent,
        title="a title",
    )
    with Image.open(path) as film:
        assert film.n_frames == 3 and film.info["duration"] == 100 and film.info["loop"] == 0
        pages = []
        for k in range(3):
            film.seek(k)
            pages.append(film.convert("RGB").tobytes())
    assert len(set(pages)) == 3 and [p.name for p in tmp_path.iterdir()] == ["film.gif"]


def test_an_animation_that_is_interrupted_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "film.gif"
    path.write_bytes(b"the one before")

    def half(self, target, **_):
        target.write_bytes(b"GIF89a")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", half)
    with pytest.raises(KeyboardInterrupt):
        animate(path, states(2), states(2).states, steps=2)
    assert path.read_bytes() == b"the one before" and [p.name for p in tmp_path.iterdir()] == [
        "film.gif"
    ]


def test_what_tensorboard_embeds():
    z = torch.tensor([[0.5, -1.0], [0.123456, 2.0]])
    assert embedding_table(z) == (["z_1", "z_2"], [["0.5", "-1"], ["0.1235", "2"]])
    assert embedding_table(torch.tensor([[0.0, -1.0]]), seen=["no"]) == (
        ["z_1", "z_2", "angle", "seen"],
        [["0", "-1", "-90.0", "no"]],
    )
    small = thumbnails(torch.full((2, 1, 40, 80), 255, dtype=torch.uint8), side=16)
    assert small.shape == (2, 3, 16, 16) and small.dtype == torch.float32
    assert small[:, :, 4:12].min() > 0.99 and small[:, :, :4].max() == small[:, :, 12:].max() == 0
    assert thumbnails(torch.rand(3, 3, 8, 8), side=8).shape == (3, 3, 8, 8)


def test_observations_are_drawn_where_they_are_of_the_space_of_the_states():
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(50, 2, generator=generator).cumsum(0)
    noisy = z + 0.2 * torch.randn(50, 2, generator=generator)
    distances = torch.cdist(z, torch.tensor([[-40.0, 0.0], [0.0, 60.0]]))
    noisy[::3] = torch.nan
    for x, drawn in (
        (noisy, True),
        (distances, False),
        (noisy.flip(1), False),
        (noisy[:, :1], False),
    ):
        figure = track_figure(Recording(z, x), z)
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert ("observation" in labels) == drawn


@pytest.mark.parametrize(("scale", "aspect"), [(1.0, 1.0), (0.001, "auto")])
def test_the_plane_has_equal_units_where_spreads_are_comparable(scale, aspect):
    z = vectors(2).states * torch.tensor([1.0, scale])
    figure = track_figure(Recording(z, torch.zeros(T, 3)), z, names=["reach [mm]", "torque [kN m]"])
    assert figure.axes[-1].get_aspect() == aspect
    assert [axes.get_ylabel() for axes in figure.axes[:2]] == ["reach [mm]", "torque [kN m]"]
    frames = Recording(z, states(2).obs)
    assert state_kind(z) == ("map" if scale == 1 else "rows")
    drawn = [dots(axes, TRUTH)[:, 0] for axes in frame_grid(frames, z).axes[1::2]]
    if scale < 1:  # every row is drawn on the scale of its component
        assert torch.stack([torch.tensor(row) for row in drawn]).std(
            0, correction=0
        ).tolist() == pytest.approx([1.0, 1.0])


def test_time_is_on_the_axis_of_time():
    data, alarms = vectors(2), torch.arange(T) == 3
    for time_step, label, step in ((None, "time step", 1.0), (0.1, "time", 0.1)):
        figure = track_figure(data, data.states, alarms=alarms, time_step=time_step)
        below = figure.axes[1]
        assert below.get_xlabel() == label and below.get_xlim() == pytest.approx((0, 4 * step))
        truth = next(line for line in below.lines if line.get_color() == TRUTH)
        assert truth.get_xdata() == pytest.approx([step * t for t in range(T)])
        marker = next(line for line in figure.axes[0].lines if line.get_marker() == "v")
        assert marker.get_xdata() == pytest.approx([3 * step])
