"""Every kind of file gives the same recording; every kind of broken file one error that
says where.
"""

import builtins
import csv
import pickle
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import kbf
from kbf.data.files import column_schema
from kbf.data.files.dataset import FileData
from kbf.data.files.layout import Layout, layout_of
from kbf.data.files.read import read, read_observations

T = 12
LAYOUT = Layout(
    states=["x", "y"], observations=["a", "b", "c"], controls=["u"], time="t", recording="run"
)


def arrays(seed=0, steps=T):
    """States, observations, controls and times, with a missing observation."""
    draw = np.random.default_rng(seed)
    obs = draw.normal(size=(steps, 3))
    obs[2, 1] = np.nan
    return {
        "states": draw.normal(size=(steps, 2)),
        "obs": obs,
        "controls": draw.normal(size=(steps, 1)),
        "times": 0.1 * np.arange(steps),
    }


def rows(runs=2):
    """Two runs as rows of a table, in other columns than asked for."""
    found = []
    for run in range(runs):
        a = arrays(run)
        for t in range(T):
            values = [*a["states"][t], *a["obs"][t], *a["controls"][t], a["times"][t]]
            cells = ["" if np.isnan(v) else repr(float(v)) for v in values]
            found.append(
                dict(zip(["x", "y", "a", "b", "c", "u", "t"], cells, strict=True))
                | {"run": f"r{run}", "note": "words"}
            )
    return found


def write_csv(path, table, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(table)
    return path


def check(contents, runs=2):
    assert len(contents.recordings) == runs
    for k, recording in enumerate(contents.recordings):
        a = arrays(k)
        np.testing.assert_array_equal(recording.states, a["states"])
        np.testing.assert_array_equal(recording.obs, a["obs"])
        np.testing.assert_array_equal(recording.controls, a["controls"])
        np.testing.assert_allclose(recording.times, a["times"])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path, delimiter):
    contents = read(write_csv(tmp_path / "rec.csv", rows(), delimiter), LAYOUT)
    check(contents)
    assert [r.name for r in contents.recordings] == ["r0", "r1"]
    assert contents.recordings[1].place(0) == f"{tmp_path / 'rec.csv'}, row {T + 2}"
    assert (contents.states, contents.observations, contents.controls) == (
        ["x", "y"],
        ["a", "b", "c"],
        ["u"],
    )


def test_a_blank_line_is_no_step_and_a_row_of_empty_cells_is_one(tmp_path):
    """As in what a running filter reads."""
    path = tmp_path / "rec.csv"
    for mark in ",\t":
        path.write_text(f"\n\nx{mark}a\n1{mark}2\n\n   \n{mark}\n3{mark}4\n\n")
        (found,) = read(path, Layout(states=["x"], observations=["a"])).recordings
        assert found.obs[:, 0].nan_to_num(-1).tolist() == [2, -1, 4] and found.states[
            :, 0
        ].nan_to_num(-1).tolist() == [1, -1, 3]
        assert found.rows.tolist() == [4, 7, 8]
    path.write_text('x\n1\n\n""\n2\n')
    (found,) = read(path, Layout(states=["x"], observations=["x"])).recordings
    assert found.obs[:, 0].nan_to_num(-1).tolist() == [1, -1, 2], (
        "csv writers quote the empty cell of a single column"
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_may_serve_twice(kind, tmp_path):
    """As state, observation and control, and the time too: it is read once."""
    table = [{"t": 0.5 * k, "x": float(k), "a": 10.0 * k} for k in range(5)]
    if kind == "csv":
        path = write_csv(tmp_path / "rec.csv", table)
    else:
        arrow, path = pytest.importorskip("pyarrow"), tmp_path / "rec.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(table), path)
    (found,) = read(
        path, Layout(states=["x", "t"], observations=["a", "x"], controls=["x"], time="t")
    ).recordings
    x, t = torch.arange(5.0).double(), 0.5 * torch.arange(5.0).double()
    assert torch.equal(found.states, torch.stack([x, t], 1)) and torch.equal(
        found.obs, torch.stack([10 * x, x], 1)
    )
    assert torch.equal(found.controls, x[:, None]) and torch.equal(found.times, t)


def test_rows_of_runs_may_be_mixed(tmp_path):
    table = rows()
    mixed = [row for pair in zip(table[:T], table[T:], strict=True) for row in pair]
    check(read(write_csv(tmp_path / "rec.csv", mixed), LAYOUT))


def test_names_of_runs_are_stripped_at_both_doors(tmp_path):
    names = ["a", " b", "a ", "b", "a", "b "]
    frame = pd.DataFrame({"run": names, "x": range(6), "a": range(6)}).astype(
        {"x": float, "a": float}
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    settings = {"states": ["x"], "observations": ["a"], "recording": "run", "test": 0.0}
    for data in (frame, tmp_path / "a.csv"):
        rows = kbf.check(data, **settings).recordings
        assert [(row["recording"], row["steps"]) for row in rows] == [("a", 3), ("b", 3)]


def test_dates_are_seconds(tmp_path):
    path = tmp_path / "rec.csv"
    path.write_text(
        "t,x,a\n2024-03-01T12:00:00,1,2\n2024-03-01T12:00:01.5,1,\n2024-03-01 "
        "12:00:03+00:00,1,NaN\n",
        encoding="utf-8",
    )
    recording = read(path, Layout(states=["x"], observations=["a"], time="t")).recordings[0]
    assert recording.times.diff().tolist() == [1.5, 1.5]
    assert recording.obs[:, 0].isnan().tolist() == [False, True, True]


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {key: [row[key] for row in rows()] for key in rows()[0]}
    numbers = {
        k: [float(v) if v else None for v in each]
        for k, each in table.items()
        if k not in ("run", "note")
    }
    parquet.write_table(
        arrow.table(numbers | {"run": table["run"], "note": table["note"]}),
        tmp_path / "rec.parquet",
    )
    check(read(tmp_path / "rec.parquet", LAYOUT))
    with pytest.raises(
        ValueError,
        match=r"rec.parquet, column note: it holds string, not numbers \(row 1: 'words'\)",
    ):
        read(tmp_path / "rec.parquet", LAYOUT._replace(observations=["note"]))
    whole = arrow.table(
        {
            "t": arrow.array([0, 1_500_000], arrow.timestamp("us")),
            "x": [1, None],
            "a": [True, False],
        }
    )
    parquet.write_table(whole, tmp_path / "dates.parquet")
    recording = read(
        tmp_path / "dates.parquet", Layout(states=["x"], observations=["a"], time="t")
    ).recordings[0]
    assert recording.times.diff().tolist() == [1.5]
    assert recording.obs.tolist() == [[1], [0]]
    assert recording.states.isnan().tolist() == [[False], [True]]


def hdf5(path, values):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            file[name] = value


def zarr_group(path, values):
    group = pytest.importorskip("zarr").open_group(str(path), mode="w")
    for name, value in values.items():
        group.create_array(name, data=np.asarray(value))


def npy(path, values):
    path.mkdir()
    for name, value in values.items():
        np.save(path / f"{name}.npy", value)


WRITERS = {
    ".npz": lambda path, values: np.savez(path, **values),
    ".h5": hdf5,
    ".zarr": zarr_group,
    "": npy,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_recording_in_arrays(tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"rec{suffix}", arrays())
    contents = read(tmp_path / f"rec{suffix}", Layout())
    check(contents, 1)
    assert (contents.states, contents.observations, contents.controls) == (
        ["z1", "z2"],
        ["x1", "x2", "x3"],
        ["u1"],
    )


def test_chunks_of_a_zarr_that_have_no_file_are_told(tmp_path):
    group = pytest.importorskip("zarr").open_group(str(tmp_path / "a.zarr"), mode="w")
    for name, width in (("states", 2), ("observations", 3)):
        group.create_array(
            name, data=1 + np.random.default_rng(0).random((40, width)), chunks=(10, width)
        )
    assert read(tmp_path / "a.zarr", Layout()).notes == ()
    (tmp_path / "a.zarr" / "observations" / "c" / "2" / "0").unlink()
    (note,) = FileData(str(tmp_path / "a.zarr")).notes
    assert (
        "array observations: 1 of 4 chunks have no file and are read as 0.0: is the copy complete?"
        in note
    )


@pytest.mark.parametrize("suffix", [".npz", ".h5", ".zarr"])
def test_many_recordings_in_arrays(tmp_path, suffix):
    both = [arrays(0), arrays(1)]
    path = tmp_path / f"batch{suffix}"
    WRITERS[suffix](path, {key: np.stack([a[key] for a in both]) for key in both[0]})
    check(read(path, Layout()))
    path = tmp_path / f"long{suffix}"
    WRITERS[suffix](
        path,
        {key: np.concatenate([a[key] for a in both]) for key in both[0]}
        | {"recording": np.repeat([7, 9], T)},
    )
    contents = read(path, Layout(states=["x", "y"]))
    check(contents)
    assert [r.name for r in contents.recordings] == ["7", "9"]
    path = tmp_path / f"numbered{suffix}"
    WRITERS[suffix](path, {f"{key}_{k}": a[key] for k, a in enumerate(both) for key in a})
    contents = read(path, Layout())
    check(contents)
    assert [r.name for r in contents.recordings] == ["0", "1"]


def test_groups_of_hdf5_and_names_of_one_s_own(tmp_path):
    both = [arrays(0), arrays(1)]
    names = {"states": "pose", "obs": "signal", "controls": "controls", "times": "times"}
    hdf5(
        tmp_path / "runs.h5",
        {f"run{k}/{names[key]}": a[key] for k, a in enumerate(both) for key in a},
    )
    contents = read(tmp_path / "runs.h5", Layout(states="pose", observations="signal"))
    check(contents)
    assert [r.name for r in contents.recordings] == ["run0", "run1"]


def test_lengths_cut_padded_batches(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        states=np.ones((2, 5, 1)),
        obs=np.ones((2, 5, 3)),
        lengths=[5, 3],
        mask=np.ones((2, 5)),
    )
    assert [len(r.obs) for r in read(tmp_path / "a.npz", Layout()).recordings] == [5, 3]
    np.savez(tmp_path / "b.npz", states=np.ones((2, 5, 1)), obs=np.ones((2, 5, 3)), lengths=[5, 6])
    with pytest.raises(ValueError, match="lengths must be 2 whole numbers from 1 to 5"):
        read(tmp_path / "b.npz", Layout())


def test_what_kbf_data_writes(tmp_path):
    values = {
        f"{part}_{key}_{k}": arrays(k)[key]
        for k, part in enumerate(["train", "test"])
        for key in ("states", "obs")
    }
    np.savez(
        tmp_path / "data.npz", **{key.replace("_1", "_0"): value for key, value in values.items()}
    )
    contents = read(tmp_path / "data.npz", Layout())
    assert [r.name for r in contents.recordings] == ["test_0", "train_0"]


def test_a_prefix_of_npy_files(tmp_path):
    np.save(tmp_path / "rec_states.npy", arrays()["states"])
    np.save(tmp_path / "rec_observations.npy", arrays()["obs"])
    assert len(read(tmp_path / "rec", Layout()).recordings[0].obs) == T


def test_masks_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", states=np.ones((4, 1)), obs=np.ones((4, 1)), mask=[1, 0, 1, 1])
    assert read(tmp_path / "a.npz", Layout()).recordings[0].mask.tolist() == [
        True,
        False,
        True,
        True,
    ]


# images


def pictures(count=5, size=(6, 8), channels=3):
    shape = (count, *size, 3) if channels == 3 else (count, *size)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def folder_of(tmp_path, images, named=False):
    folder = tmp_path / "views"
    folder.mkdir()
    lines = ["frame,x" if named else "x"]
    for k, image in enumerate(images):
        Image.fromarray(image).save(folder / f"im{k}.png")
        lines.append(f"im{len(images) - 1 - k}.png,{k}" if named else f"{k}")
    (folder / "states.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_images(tmp_path, channels):
    images = pictures(12, channels=channels)  # im10 comes after im9
    recording = read(folder_of(tmp_path, images), Layout(states=["x"])).recordings[0]
    assert recording.obs.dtype == torch.uint8
    expected = images[:, None] if channels == 1 else images.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(recording.obs, expected)
    assert recording.states[:, 0].tolist() == list(range(12))


def test_a_column_that_names_images(tmp_path):
    images = pictures()
    folder = folder_of(tmp_path, images, named=True)
    expected = images[::-1].transpose(0, 3, 1, 2)
    for path in (folder, folder / "states.csv"):
        np.testing.assert_array_equal(
            read(path, Layout(states=["x"], images="frame")).recordings[0].obs, expected
        )
    text = (folder / "states.csv").read_text(encoding="utf-8")
    (folder / "states.csv").write_text(text.replace("im3.png", ""), encoding="utf-8")
    recording = read(folder, Layout(states=["x"], images="frame")).recordings[0]
    assert recording.mask.tolist() == [True, False, True, True, True]
    (folder / "states.csv").write_text(text.replace("im3.png", "gone.png"), encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"states.csv, row 3: there is no image .*gone.png"):
        read(folder, Layout(states=["x"], images="frame"))


def test_images_are_resized(tmp_path):
    grey = np.full((3, 40, 60, 3), 77, dtype=np.uint8)
    recording = read(folder_of(tmp_path, grey), Layout(states=["x"], size=[10, 15])).recordings[0]
    assert recording.obs.shape == (3, 3, 10, 15)
    assert (recording.obs == 77).all()


def test_a_video(tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "rec.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for k in range(6):
            image = np.full((16, 32, 3), 40 * k, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    (tmp_path / "rec.csv").write_text("x\n" + "\n".join("012345") + "\n", encoding="utf-8")
    recording = read(tmp_path / "rec.mp4", Layout(states=["x"])).recordings[0]
    assert recording.obs.shape == (6, 3, 16, 32)
    np.testing.assert_allclose(recording.obs.double().mean((1, 2, 3)), 40 * np.arange(6), atol=6)
    (tmp_path / "rec.csv").write_text("x\n1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 6 images, .* has 1 rows"):
        read(tmp_path / "rec.mp4", Layout(states=["x"]))
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"bad.mp4 is no video"):
        read(tmp_path / "bad.mp4", Layout(), states=False)


@pytest.mark.parametrize("shape", [(4, 6, 8), (4, 6, 8, 3), (4, 3, 6, 8), (2, 4, 3, 6, 8)])
def test_arrays_of_images(tmp_path, shape):
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.savez(
        tmp_path / "a.npz",
        states=np.ones((*shape[:-3], 1) if len(shape) == 5 else (4, 1)),
        obs=images,
    )
    contents = read(tmp_path / "a.npz", Layout())
    assert len(contents.recordings) == (2 if len(shape) == 5 else 1)
    assert contents.recordings[0].obs.shape == (4, 1 if shape == (4, 6, 8) else 3, 6, 8)
    assert contents.observations == []


def test_images_as_numbers_from_0_to_1(tmp_path):
    images = np.random.default_rng(0).random((4, 3, 6, 8))
    images[1] = np.nan
    np.savez(tmp_path / "a.npz", states=np.ones((4, 1)), obs=images)
    recording = read(tmp_path / "a.npz", Layout()).recordings[0]
    np.testing.assert_allclose(recording.obs[0] / 255.0, images[0], atol=0.002)
    assert recording.mask.tolist() == [True, False, True, True]
    np.savez(tmp_path / "b.npz", states=np.ones((4, 1)), obs=images * 700)
    with pytest.raises(ValueError, match="from 0 to 1; got 0 to"):
        read(tmp_path / "b.npz", Layout())


def test_broken_images(tmp_path):
    folder = folder_of(tmp_path, pictures())
    (folder / "im2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"im2.png is no image, or damaged"):
        read(folder, Layout(states=["x"]))
    Image.fromarray(pictures(1, (3, 3))[0]).save(folder / "im2.png")
    with pytest.raises(
        ValueError, match=r"im2.png is \(3, 3, 3\) \(C, H, W\), .*im0.png is \(3, 6, 8\): data.size"
    ):
        read(folder, Layout(states=["x"]))
    Image.fromarray(np.zeros((6, 8), dtype=np.uint16)).save(folder / "im2.png")
    with pytest.raises(ValueError, match=r"im2.png: images of mode I;16 are not read"):
        read(folder, Layout(states=["x"]))
    (folder / "im2.png").unlink()
    with pytest.raises(ValueError, match=r"has 4 images, .*states.csv has 5 rows"):
        read(folder, Layout(states=["x"]))
    with pytest.raises(ValueError, match=r"data.size must be \[height,width\]"):
        read(folder, Layout(states=["x"], size=[4, 0]))
    (folder / "states.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no CSV in it: data.table=FILE"):
        read(folder, Layout(states=["x"]))
    assert len(read(folder, Layout(), states=False).recordings[0].obs) == 4


# broken files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y,a\n1,2,3\n1,oops,3\n", r"rec.csv, row 3, column y: 'oops' is no number"),
        ("x,y,a\n1,2,3\n1,inf,3\n", r"rec.csv, row 3, column y: 'inf' is no finite number"),
        ("x,y,a\n1,2,3\n1,2\n", r"rec.csv, row 3: 2 cells, the header has 3"),
        ("x,y,a\n", "there is no row below the header"),
        ("", "the first line must name the columns, got nothing"),
        ("1,2,3\n4,5,6\n", "the first line must name the columns, got 1, 2, 3"),
        ("x,y,y,a\n1,2,3,4\n", "two columns are called 'y'"),
        ("x,yy,a\n1,2,3\n", "there is no column 'y'; it has x, yy, a; did you mean 'yy'?"),
        ('x,y,a\n1,2,3\n1,2,"3\n', "rec.csv, row 3: this is not CSV"),
        (
            'x,y,a\n1,"2,5",3\n',
            "row 2, column y: '2,5' is no number: decimals need a point, or data.decimal=','",
        ),
    ],
)
def test_broken_csv(tmp_path, text, message):
    path = tmp_path / "rec.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read(path, Layout(states=["x", "y"], observations=["a"]))


def test_csv_that_is_no_text_and_columns_that_nobody_named(tmp_path):
    path = tmp_path / "rec.csv"
    path.write_bytes("x,a\n1,ü\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"rec.csv is not text in UTF-8"):
        read(path, Layout(states=["x"], observations=["a"]))
    path.write_text("x,a\n1,2\n", encoding="utf-8")
    for layout, side in ((Layout(), "states"), (Layout(states=["x"]), "observations")):
        with pytest.raises(
            ValueError,
            match=rf"data.{side}=\[...\] must name the columns of the {side}; it has x, a",
        ):
            read(path, layout)


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.path: there is no file .*nothing.csv"):
        read(tmp_path / "nothing.csv", Layout())
    (tmp_path / "rec.xlsx").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"files of this kind are not known; known are .csv"):
        read(tmp_path / "rec.xlsx", Layout())


@pytest.mark.parametrize("name", ["a.npz", "a.h5", "a.zarr", "a.parquet"])
def test_damaged_files(tmp_path, name):
    path = tmp_path / name
    if name == "a.zarr":
        path.mkdir()
        (path / "zarr.json").write_text("{not json", encoding="utf-8")
    else:
        path.write_bytes(b"PK\x03\x04 damaged" if name == "a.npz" else b"damaged all the way")
    with pytest.raises(ValueError, match=f"{name} is (damaged|no)"):
        read(path, Layout(states=["x"], observations=["a"]))


def test_a_truncated_npz(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a.npz is damaged"):
        read(tmp_path / "a.npz", Layout())


class Bomb:
    """Unpickling it would leave a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_is_unpickled(tmp_path):
    mark = tmp_path / "exploded"
    np.savez(tmp_path / "a.npz", states=np.array([Bomb(mark)], dtype=object), obs=np.ones((1, 1)))
    with pytest.raises(
        ValueError, match=r"a.npz, array states holds Python objects, which are not read"
    ):
        read(tmp_path / "a.npz", Layout())
    (tmp_path / "b.npz").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"b.npz"):
        read(tmp_path / "b.npz", Layout())
    group = tmp_path / "c.zarr"
    (group / "states").mkdir(parents=True)
    (group / ".zgroup").write_text('{"zarr_format": 2}', encoding="utf-8")
    (group / "states" / ".zarray").write_text(
        '{"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "<f8", "fill_value": 0, '
        '"order": "C", "compressor": null, '
        '"filters": [{"id": "pickle"}]}',
        encoding="utf-8",
    )
    (group / "states" / "0").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ValueError, match=r"holds pickled Python objects, which are not read"):
        read(group, Layout())
    assert not mark.exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"states": np.ones((4, 1))},
            "there are no observations: data.observations=NAME names one of states",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((5, 1))},
            "has 5 observations, but states of length 4",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((4, 1)), "mask": np.ones(3)},
            "but mask of length 3",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.array(["a"] * 4)},
            "array obs: it holds <U1, not numbers",
        ),
        (
            {"states": np.array([[1.0], [np.inf]]), "obs": np.ones((2, 1))},
            "array states, row 1: infinite",
        ),
        ({"states": np.ones((2, 4, 1)), "obs": np.ones((2, 5, 1))}, r"are not \(B, T, ...\) alike"),
        (
            {"states_0": np.ones((4, 1)), "obs_1": np.ones((4, 1))},
            "recording 0 has no observations",
        ),
        ({"states": np.ones((0, 1)), "obs": np.ones((0, 1))}, "has no steps"),
        ({"states": np.ones((4, 1)), "obs": np.ones((4, 7, 6, 8))}, "images have 1 or 3 channels"),
        ({}, "holds no arrays"),
        ({"states": np.ones((4, 1)), "obs": np.array(1.0)}, "array obs: it is a single value"),
        ({"states": np.ones((4, 1)), "obs": np.ones((4, 0))}, "its observations have no columns"),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((4, 2)), "mask": np.ones((4, 2))},
            r"mask must be \(T,\), got \(4, 2\)",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((4, 2)), "times": np.ones((4, 2))},
            r"time must be \(T,\), got \(4, 2\)",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((4, 2)), "recording": np.ones((4, 2))},
            r"recording of shape \(4, 2\)",
        ),
        (
            {"states": np.ones((4, 1)), "obs": np.ones((4, 2)), "recording": ["a", "a", "", "b"]},
            "step 2: the recording's name is missing",
        ),
        (
            {"states": np.ones((2, 4, 1)), "obs": np.ones((2, 4, 1)), "lengths": [2.5, 4]},
            "lengths must be 2 whole numbers",
        ),
        (
            {
                "states_0": np.ones((4, 1)),
                "obs_0": np.ones((4, 1)),
                "states_1": np.ones((4, 1)),
                "obs_1": np.ones((4, 2)),
            },
            r"the observations of recording 1 are \(2,\), those of 0 \(1,\): "
            r"all recordings must be "
            r"alike",
        ),
        (
            {"states_0": np.ones((4, 1)), "obs_0": np.ones((4, 1)), "obs_1": np.ones((4, 1))},
            "obs_1 has no states, others have",
        ),
        (
            {
                "states": np.ones((4, 1)),
                "obs": np.ones((4, 1)),
                "raw_obs": np.ones((4, 1)),
                "controls": np.ones((4, 1)),
            },
            "raw_obs has no states, others have: .* data.observations=NAME",
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, values, message):
    np.savez(tmp_path / "a.npz", **values)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.npz", Layout())


def test_names_that_do_not_fit_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    with pytest.raises(
        ValueError, match=r"there is no array 'pose' \(data.states\); it has states, obs"
    ):
        read(tmp_path / "a.npz", Layout(states="pose"))
    with pytest.raises(ValueError, match=r"3 names \(x, y, z\) for an array of 2 columns"):
        read(tmp_path / "a.npz", Layout(states=["x", "y", "z"]))


@pytest.mark.parametrize("name", ["a.parquet", "a.h5", "a.zarr", "a.mp4"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    package = {"a.parquet": "pyarrow", "a.h5": "h5py", "a.zarr": "zarr", "a.mp4": "av"}[name]
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=rf'needs the package {package}, which is not installed: pip install "kbf\[own\]"',
    ):
        read(tmp_path / name, Layout(states=["x"], observations=["a"]), states=False)


def test_csv_and_npz_need_no_further_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(wanted, *rest, **more):
        if wanted.split(".")[0] in ("pyarrow", "h5py", "zarr", "av"):
            raise ImportError(wanted)
        return real(wanted, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    check(read(write_csv(tmp_path / "rec.csv", rows()), LAYOUT))
    np.savez(tmp_path / "a.npz", **arrays())
    check(read(tmp_path / "a.npz", Layout()), 1)


# observations alone


def test_observations_alone(tmp_path):
    table = [{key: row[key] for key in ("c", "a", "b", "t", "u", "run")} for row in rows()]
    path = write_csv(tmp_path / "new.csv", table)
    column_schema = {
        "states": [["number", ["x"]], ["angle", ["y"]]],
        "observations": [["number", ["a"]], ["angle", ["b"]], ["number", ["c"]]],
        "controls": ["u"],
        "unit": "radians",
    }
    config = LAYOUT._asdict() | {
        "column_schema": column_schema,
        "time_as_control": True,
        "time_step": 0.1,
    }
    found = read_observations(path, config)
    assert [o.name for o in found] == ["r0", "r1"]
    a = arrays(0)
    np.testing.assert_allclose(
        found[0].obs[0],
        [a["obs"][0, 0], np.cos(a["obs"][0, 1]), np.sin(a["obs"][0, 1]), a["obs"][0, 2]],
    )
    assert found[0].obs[2].isnan().all()
    assert found[0].mask.tolist() == [t != 2 for t in range(T)]
    np.testing.assert_allclose(
        found[0].controls, np.concatenate([a["controls"], np.full((T, 1), 0.1)], 1)
    )
    np.testing.assert_allclose(found[0].times, a["times"])
    with pytest.raises(ValueError, match="there is no column 'b'"):
        read_observations(
            write_csv(tmp_path / "less.csv", [{"a": 1, "c": 2, "t": 0, "u": 0, "run": "r"}]), config
        )
    np.savez(tmp_path / "wide.npz", obs=np.ones((4, 5)), times=np.arange(4.0))
    arrays_config = Layout()._asdict() | {"column_schema": column_schema | {"controls": []}}
    with pytest.raises(ValueError, match=r"3 names \(a, b, c\) for an array of 5 columns"):
        read_observations(tmp_path / "wide.npz", arrays_config)
    with pytest.raises(
        ValueError, match=r"5 columns of observations, the training had 3 \(a, b, c\)"
    ):
        read_observations(tmp_path / "wide.npz", arrays_config | {"observations": "obs"})
    np.savez(tmp_path / "images.npz", obs=np.zeros((4, 8, 8), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"0 columns of observations, the training had 3"):
        read_observations(tmp_path / "images.npz", arrays_config)


def test_images_alone(tmp_path):
    config = Layout()._asdict() | {
        "column_schema": {
            "states": [["number", ["x"]]],
            "observations": [],
            "controls": [],
            "unit": "radians",
        }
    }
    found = read_observations(folder_of(tmp_path, pictures()), config)[0]
    assert found.obs.dtype == torch.uint8
    assert found.obs.shape == (5, 3, 6, 8)
    assert found.mask is None


def test_new_recordings_are_cut_at_gaps_and_checked(tmp_path):
    config = LAYOUT._asdict() | {
        "recording": None,
        "controls": None,
        "observations": ["a"],
        "time_step": 0.1,
    }
    config["column_schema"] = {
        "states": [["number", ["x"]]],
        "observations": [["number", ["a"]]],
        "controls": [],
        "unit": "radians",
    }
    path = tmp_path / "new.csv"
    path.write_text("t,a\n0,1\n0.1,2\n9,3\n9.1,4\n", encoding="utf-8")
    assert [(o.name, o.obs[:, 0].tolist()) for o in read_observations(path, config)] == [
        ("new[0:2]", [1, 2]),
        ("new[2:4]", [3, 4]),
    ]
    path.write_text("t,a\n0,1\n0.1,2\n0.1,3\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"new.csv, row 4: time 0.1 after 0.1; times must increase"
    ):
        read_observations(path, config)


@pytest.mark.parametrize("name", ["run.npy", "a.h5", "a.zarr"])
def test_a_damaged_array_is_named(tmp_path, name):
    if name == "run.npy":
        np.save(tmp_path / "run_states.npy", np.ones((50, 2)))
        np.save(tmp_path / "run_obs.npy", np.ones((50, 2)))
        path, file, called = tmp_path / "run", tmp_path / "run_obs.npy", "array obs: damaged"
    elif name == "a.h5":
        path = file = tmp_path / name
        with pytest.importorskip("h5py").File(path, "w") as group:
            for key in ("states", "obs"):
                group.create_dataset(
                    key,
                    data=np.random.default_rng(0).normal(size=(500, 2)),
                    fletcher32=True,
                    chunks=True,
                )
        called = "damaged"
    else:
        path = tmp_path / name
        group = pytest.importorskip("zarr").open_group(str(path), mode="w")
        for key in ("states", "obs"):
            group.create_array(key, data=np.random.default_rng(0).normal(size=(50, 2)))
        file = next(f for f in (path / "obs" / "c").rglob("*") if f.is_file())
        called = "array obs: damaged"
    whole = bytearray(file.read_bytes())
    cut = whole[:200] if name != "a.h5" else whole[:-3000] + bytes(200) + whole[-2800:]
    file.write_bytes(cut)
    with pytest.raises(ValueError, match=called):
        read(path, Layout())


def test_observations_of_another_kind_of_file(tmp_path):
    """Columns of the training's table are no arrays; one .npy is observations; dates of arrays are
    seconds.
    """
    config = {
        **LAYOUT._asdict(),
        "column_schema": column_schema.ColumnSchema.from_dict(
            {
                "states": [["number", ["x"]], ["number", ["y"]]],
                "observations": [["number", [n]] for n in "abc"],
                "controls": [],
                "unit": "radians",
            }
        ).to_dict(),
        "controls": None,
    }
    a = arrays()
    day = np.datetime64("2026-01-01") + (a["times"] * 1e6).astype("timedelta64[us]")
    np.savez(tmp_path / "a.npz", obs=a["obs"], times=day)
    (found,) = read_observations(tmp_path / "a.npz", config)
    np.testing.assert_allclose(found.times.diff(), 0.1, atol=1e-5)
    np.save(tmp_path / "lone.npy", a["obs"])
    (found,) = read_observations(tmp_path / "lone.npy", config)
    assert found.obs.shape == (T, 3) and found.times is None
    with pytest.raises(ValueError, match="is a single array, without states"):
        read(tmp_path / "lone.npy", Layout())
    with pytest.raises(ValueError, match=r"there is no array 't' \(data.time\)"):
        read(tmp_path / "a.npz", Layout(states="obs", time="t"))


def test_parquet_dates_as_text_and_decimals(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {
        "x": arrow.array([1, 2]).cast(arrow.decimal128(30, 2)),
        "a": [1.0, 2.0],
        "t": ["2026-01-01T00:00:00", "2026-01-01T00:00:01"],
    }
    parquet.write_table(arrow.table(table), tmp_path / "a.parquet")
    layout = Layout(states=["x"], observations=["a"], time="t")
    (found,) = read(tmp_path / "a.parquet", layout).recordings
    assert found.times.diff().tolist() == [1.0] and found.states.flatten().tolist() == [1.0, 2.0]
    parquet.write_table(arrow.table({**table, "t": ["0", "noon"]}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"b.parquet, row 2, column t: 'noon' is no number and no date"
    ):
        read(tmp_path / "b.parquet", layout)


def test_a_row_that_names_no_sequence(tmp_path):
    table = rows()
    table[3]["run"] = ""
    with pytest.raises(ValueError, match=r"row 5: the recording's name is missing"):
        read(write_csv(tmp_path / "rec.csv", table), LAYOUT)


def test_a_size_that_is_one_number():
    with pytest.raises(ValueError, match=r"data.size must be \[height,width\] in pixels, got 24"):
        layout_of({"size": 24})


# texts as loggers write them

PLAIN = "x,a,b\n1.5,2,0.25\n-1,3.25,1e3\n0.5,,7\n"


def table_of(path, text, encoding="utf-8", **roles):
    path.write_bytes(text.encode(encoding))
    layout = Layout(states=["x"], observations=["a", "b"])._replace(**roles)
    return read(path, layout).recordings[0]


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace(",", ";").replace(".", ","),  # decimal commas
        PLAIN.replace(",", "\t").replace(".", ","),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace("\n", ",,\n"),  # unused columns at the end
        PLAIN.replace(",", ";").replace(".", ",").replace("\n", ";;\n"),
        PLAIN.replace(",", " , "),
        PLAIN.replace("1.5", '"1.5"'),
        "\n\n" + PLAIN.replace("7", "7\n\n"),
        PLAIN.replace(",,", ",NULL,"),
        PLAIN.replace(",,", ",N/a,"),
    ],
)
def test_texts_of_loggers_are_read_alike(tmp_path, text):
    plain = table_of(tmp_path / "plain.csv", PLAIN)
    found = table_of(tmp_path / "rec.csv", text)
    np.testing.assert_array_equal(found.states, plain.states)
    np.testing.assert_array_equal(found.obs, plain.obs)
    assert found.obs.tolist()[1] == [3.25, 1000] and bool(found.obs[2, 0].isnan())


def test_line_numbers_are_those_of_the_text(tmp_path):
    assert table_of(
        tmp_path / "a.csv", "\n" + PLAIN.replace("\n-1", "\n\n \n-1")
    ).rows.tolist() == [*(3, 6, 7)]
    with pytest.raises(ValueError, match=r"row 6, column b: '1e3x' is no number$"):
        table_of(tmp_path / "a.csv", "\n" + PLAIN.replace("\n-1", "\n\n \n-1").replace("e3", "e3x"))
    with pytest.raises(ValueError, match=r"row 4: 4 cells, the header has 3"):
        table_of(tmp_path / "a.csv", PLAIN.replace("7", "7,7"))


@pytest.mark.parametrize("suffix", [".gz", ".zip"])
def test_compressed_tables(tmp_path, suffix):
    import gzip
    import zipfile

    path = tmp_path / f"rec.csv{suffix}"
    if suffix == ".gz":
        path.write_bytes(gzip.compress(PLAIN.encode()))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("rec.csv", PLAIN)
    found = read(path, Layout(states=["x"], observations=["a", "b"])).recordings[0]
    np.testing.assert_array_equal(found.obs, table_of(tmp_path / "a.csv", PLAIN).obs)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=f"rec.csv{suffix} is damaged"):
        read(path, Layout(states=["x"], observations=["a", "b"]))


def test_encodings_are_named(tmp_path):
    text = PLAIN.replace("a", "Kältemittel [°C]")
    roles = {"observations": ["Kältemittel [°C]", "b"]}
    for encoding in ("latin-1", "utf-16"):
        found = table_of(tmp_path / "a.csv", text, encoding, text_encoding=encoding, **roles)
        assert found.obs.tolist()[0] == [2, 0.25]
    assert table_of(tmp_path / "a.csv", text, "utf-16", **roles).obs.tolist()[0] == [2, 0.25]
    with pytest.raises(ValueError, match=r"not text in UTF-8.*data.text_encoding=latin-1"):
        table_of(tmp_path / "a.csv", text, "latin-1", **roles)
    with pytest.raises(ValueError, match="there is no encoding 'latin9000'"):
        table_of(tmp_path / "a.csv", text, text_encoding="latin9000", **roles)
    assert (
        FileData(
            written_latin(tmp_path, text), states=["x"], text_encoding="latin-1", test=0.0, **roles
        ).column_schema.columns("observations")
        == roles["observations"]
    )


def written_latin(folder, text):
    (folder / "latin.csv").write_bytes(text.encode("latin-1"))
    return folder / "latin.csv"
