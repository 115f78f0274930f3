"""Files of arrays: MATLAB's, NetCDF, an array for each column, arrays that are transposed."""

import numpy as np
import pytest
import scipy.io
import torch

from kbf.data.files.array_files import opened
from kbf.data.files.in_memory import contents_of
from kbf.data.files.layout import Layout, layout_of
from kbf.data.files.read import read, read_all, read_observations
from kbf.recording import Recording

T = 30


@pytest.fixture
def arrays(rng):
    return {
        "states": rng.normal(size=(T, 2)),
        "obs": rng.normal(size=(T, 3)),
        "times": 0.1 * np.arange(T),
    }


def check(contents, arrays):
    (found,) = contents.recordings
    np.testing.assert_array_equal(found.states, arrays["states"])
    np.testing.assert_array_equal(found.obs, arrays["obs"])
    np.testing.assert_array_equal(found.times, arrays["times"])
    assert not contents.notes


def write_mat_73(path, arrays):
    """As MATLAB writes: HDF5 behind 512 bytes of text, arrays transposed."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in arrays.items():
            stored = file.create_dataset(
                name, data=np.atleast_2d(values).reshape(len(values), -1).T
            )
            stored.attrs["MATLAB_class"] = np.bytes_("double")
        file.create_group("#refs#").create_dataset("a", data=np.zeros(3))
    with path.open("r+b") as file:
        text = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
        file.write(text)


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_matlab(tmp_path, arrays, version):
    path = tmp_path / "rec.mat"
    if version == "5":
        scipy.io.savemat(path, arrays)
    else:
        write_mat_73(path, arrays)
    check(read(path, Layout()), arrays)
    turned = {name: values.T for name, values in arrays.items()}
    scipy.io.savemat(path, turned) if version == "5" else write_mat_73(path, turned)
    check_turned(read(path, Layout()), arrays)


def check_turned(contents, arrays):
    check(contents._replace(notes=()), arrays)
    assert sorted(note.partition(": ")[2] for note in contents.notes) == [
        f"observations (3, {T}) are read as {T} steps of 3",
        f"states (2, {T}) are read as {T} steps of 2",
    ]


def test_matlab_structures_cells_and_damage(tmp_path, arrays):
    path = tmp_path / "rec.mat"
    ids = np.array([f"run{k // 10}" for k in range(T)], dtype=object)
    scipy.io.savemat(path, {"log": {"x": arrays["states"], "y": arrays["obs"]}, "run": ids})
    found = read(path, Layout(states="log/x", observations="log/y", recording="run"))
    assert [each.name for each in found.recordings] == ["run0", "run1", "run2"]
    np.testing.assert_array_equal(found.recordings[1].obs, arrays["obs"][10:20])
    with pytest.raises(ValueError, match=r"there are no states.* log/x, log/y, run"):
        read(path, Layout())
    for content in (b"", b"no", path.read_bytes()[:300]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is damaged, or no MATLAB file|holds no arrays"):
            read(path, Layout())


@pytest.mark.parametrize("suffix", ["npz", "mat"])
def test_an_array_for_each_column(tmp_path, arrays, suffix):
    columns = {
        "x": arrays["states"][:, 0],
        "y": arrays["states"][:, 1],
        **{f"s{k}": arrays["obs"][:, k] for k in range(3)},
        "t": arrays["times"],
    }
    path = tmp_path / f"rec.{suffix}"
    np.savez(path, **columns) if suffix == "npz" else scipy.io.savemat(path, columns)
    layout = layout_of({"states": ["x", "y"], "observations": ["s*"], "time": "t"})
    contents = read(path, layout)
    check(contents, arrays)
    assert contents.observations == ["s0", "s1", "s2"]
    check(contents_of(columns, layout), arrays)
    with pytest.raises(ValueError, match=r"no column 'z'.*x, y, s0"):
        read(path, layout._replace(states=["x", "z"]))
    columns["s1"] = columns["s1"][:-1]
    np.savez(tmp_path / "rec.npz", **columns)
    with pytest.raises(ValueError, match=r"array s1: it is \(29,\), not one number for each step"):
        read(tmp_path / "rec.npz", layout)


def test_names_of_the_columns_of_one_array_stay(tmp_path, arrays):
    np.savez(tmp_path / "rec.npz", **arrays)
    layout = Layout(states=["x", "y"], observations=["a", "b", "c"])
    contents = read(tmp_path / "rec.npz", layout)
    check(contents, arrays)
    assert contents.states == ["x", "y"]


@pytest.mark.parametrize("turned", [["obs"], ["states"], ["states", "obs"]])
def test_transposed_arrays_are_found(tmp_path, arrays, turned):
    np.savez(tmp_path / "rec.npz", **arrays | {name: arrays[name].T for name in turned})
    contents = read(tmp_path / "rec.npz", Layout())
    check(contents._replace(notes=()), arrays)
    assert len(contents.notes) == len(turned)
    # without times, two arrays with the same number of columns
    both = {name: arrays[name].T for name in ("states", "obs")}
    np.savez(tmp_path / "rec.npz", **both)
    contents = read(tmp_path / "rec.npz", Layout())
    assert contents.recordings[0].obs.shape == (T, 3) and len(contents.notes) == 2


def test_recordings_that_are_not_transposed(tmp_path, rng):
    for states, obs in [
        ((3, 3), (3, 3)),
        ((5, 2), (5, 40)),
        ((2, 1), (2, 1)),
        ((4, 3, 2), (4, 3, 5)),
    ]:
        np.savez(tmp_path / "rec.npz", states=rng.normal(size=states), obs=rng.normal(size=obs))
        contents = read(tmp_path / "rec.npz", Layout())
        assert not contents.notes and contents.recordings[0].obs.shape[1] == obs[-1]
    np.savez(tmp_path / "rec.npz", states=rng.normal(size=(8, 2)), obs=rng.normal(size=(9, 3)))
    with pytest.raises(ValueError, match="has 9 observations, but states of length 8"):
        read(tmp_path / "rec.npz", Layout())


def test_a_recording_of_one_step_among_longer_ones(rng):
    """(1, 2) is one step of two numbers there; alone it is two steps of one number."""
    long, short = (torch.from_numpy(rng.normal(size=(n, 2))) for n in (T, 1))
    contents = contents_of([Recording(each, each) for each in (long, short)], Layout())
    assert [tuple(each.obs.shape) for each in contents.recordings] == [(T, 2), (1, 2)]
    (alone,) = contents_of([Recording(short, short)], Layout()).recordings
    assert tuple(alone.obs.shape) == (2, 1)


def test_transposed_observations_alone(tmp_path, arrays):
    from kbf.data.files.column_schema import ColumnSchema

    np.save(tmp_path / "new.npy", arrays["obs"].T)
    config = {"column_schema": ColumnSchema.unnamed(2, 3, 0).to_dict()}
    (found,) = read_observations(tmp_path / "new.npy", config)
    np.testing.assert_array_equal(found.obs, arrays["obs"])


def test_netcdf(tmp_path, arrays):
    path = tmp_path / "rec.nc"
    path.write_bytes(b"CDF")
    try:
        import xarray
    except ImportError:
        with pytest.raises(ValueError, match="NetCDF is read by xarray: pip install xarray"):
            read(path, Layout())
        return
    with pytest.raises(ValueError, match="is no NetCDF file, or damaged"):
        read(path, Layout())
    start = np.datetime64("2026-01-01T00:00")
    times = start + np.arange(T) * np.timedelta64(100, "ms")
    data = xarray.Dataset(
        {
            "x": ("time", arrays["states"][:, 0]),
            "y": ("time", arrays["states"][:, 1]),
            "s": (("sensor", "time"), arrays["obs"].T),
        },
        {"time": times},
    )
    data.to_netcdf(path)
    layout = layout_of({"states": ["x", "y"], "observations": "s"})
    (found,) = read(path, layout).recordings
    np.testing.assert_array_equal(found.obs, arrays["obs"])
    np.testing.assert_array_equal(found.states, arrays["states"])
    np.testing.assert_allclose(found.times.diff(), 0.1, rtol=1e-5)
    with opened(path) as (names, _, _):
        assert set(names) == {"x", "y", "s", "time"}


def written(folder, names, columns="x,a,b", suffix=".csv"):
    folder.mkdir(exist_ok=True)
    for k, name in enumerate(names):
        rows = [f"{10 * k + t},{t},{t + k}" for t in range(4)]
        (folder / f"{name}{suffix}").write_text("\n".join([columns, *rows]))
    return folder


def test_many_files(tmp_path):
    folder = written(tmp_path / "runs [new]", ["run10", "run2", "run1"])
    (folder / "README.txt").write_text("about")
    (folder / ".hidden.csv").write_text("nothing")
    layout = layout_of({"states": ["x"], "observations": ["a", "b"]})
    list_ = [folder / "run1.csv", str(folder / "run2.csv"), folder / "run10.csv"]
    pattern = tmp_path / "runs*" / "*.csv"
    for paths in (folder, str(folder), pattern, list_):
        contents = read_all(paths, layout)
        assert [each.name for each in contents.recordings] == ["run1", "run2", "run10"]
        assert [float(each.states[0]) for each in contents.recordings] == [20, 10, 0]
        assert contents.recordings[0].place(0) == f"{folder / 'run1.csv'}, row 2"
    with pytest.raises(FileNotFoundError, match="no file matches"):
        read_all(tmp_path / "none*.csv", layout)


def test_many_files_have_the_columns_of_the_first(tmp_path):
    folder = written(tmp_path / "runs", ["r1"])
    (folder / "r2.csv").write_text("b,a,x,c\n1,2,3,4\n2,3,4,5\n")
    layout = layout_of({"states": ["x"], "observations": ["?"]})
    (folder / "r2.csv").write_text("b,a,x\n1,2,3\n2,3,4\n")
    first, second = read_all(folder, layout).recordings
    assert first.obs[1].tolist() == [1.0, 1.0] and second.obs[0].tolist() == [2.0, 1.0]
    (folder / "r2.csv").write_text("b,x\n1,2\n2,3\n")
    with pytest.raises(ValueError, match=r"r2.csv: there is no column 'a'; it has b, x"):
        read_all(folder, layout)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [written(tmp_path / name, ["log"]) for name in ("monday", "tuesday")]
    layout = layout_of({"states": ["x"], "observations": ["a"]})
    contents = read_all([folder / "log.csv" for folder in folders], layout)
    assert [each.name for each in contents.recordings] == ["monday/log", "tuesday/log"]
