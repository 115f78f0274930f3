"""Files of somebody's that are small on the disk and large behind it, or that reach outside of
their folder.
"""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from PIL import Image

from kbf.data.files import layout
from kbf.data.files.layout import Layout, layout_of
from kbf.data.files.read import read
from kbf.data.files.texts import number, seconds


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def test_an_archive_that_expands_is_refused_with_the_numbers(tmp_path, monkeypatch):
    path = npz(tmp_path / "a.npz", states=np.zeros((1000, 2)), observations=np.zeros((1000, 2)))
    assert path.stat().st_size < 2000 and len(read(path, Layout()).recordings[0].obs) == 1000
    monkeypatch.setattr(layout, "MAX_BYTES", 30_000)
    with pytest.raises(
        ValueError,
        match=r"a\.npz: 32,\d\d\d bytes in memory, more than the limit of 30,000",
    ):
        read(path, Layout())


def test_a_zip_bomb_of_100_GB_is_refused_before_it_is_unpacked(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("states", "observations"):
            file.create_dataset(
                name, shape=(10**10, 2), dtype="f4", chunks=(10**5, 2), compression="gzip"
            )
    assert (tmp_path / "a.h5").stat().st_size < 10_000
    with pytest.raises(ValueError, match=r": 160,000,000,000 bytes.*4,294,967,296"):
        read(tmp_path / "a.h5", Layout())


def test_numbers_of_other_files_are_not_read(tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["states"] = np.zeros((2, 1))
        file.create_dataset(
            "observations", shape=(2, 1), dtype="f8", external=[(str(tmp_path / "secret"), 0, 16)]
        )
    with pytest.raises(ValueError, match="its numbers are in other files"):
        read(tmp_path / "a.h5", Layout())


@pytest.mark.slow
def test_a_picture_of_a_billion_pixels_is_refused(tmp_path):
    Image.new("1", (40_000, 30_000)).save(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size < 300_000
    with pytest.raises(ValueError, match=r"a\.png"):
        read(tmp_path, Layout(), states=False)
    Image.new("1", (8193, 8192)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"8193 x 8192 pixels, more than the limit of 67,108,864"):
        read(tmp_path, Layout(), states=False)


def test_pictures_that_are_too_many_are_refused(tmp_path, monkeypatch):
    for k in range(5):
        Image.new("L", (10, 10)).save(tmp_path / f"{k}.png")
    assert read(tmp_path, Layout(), states=False).recordings[0].obs.shape == (5, 1, 10, 10)
    monkeypatch.setattr(layout, "MAX_BYTES", 499)
    with pytest.raises(ValueError, match="all its 5 images: 500 bytes"):
        read(tmp_path, Layout(), states=False)


@pytest.mark.parametrize("name", ["../out.png", "/etc/out.png", "in/../../out.png", "link.png"])
def test_image_tables_stay_inside_their_folder_unless_told(tmp_path, name):
    folder = tmp_path / "in"
    folder.mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "out.png")
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    (folder / "t.csv").write_text(f"x,file\n1,{name}\n2,{name}\n", encoding="utf-8")
    layout = Layout(states=["x"], images="file")
    with pytest.raises(ValueError, match=r"outside of .*data\.images_outside=true"):
        read(folder / "t.csv", layout)
    if name == "../out.png":
        assert (
            len(read(folder / "t.csv", layout._replace(images_outside=True)).recordings[0].obs) == 2
        )
    with pytest.raises(ValueError, match="images_outside must be true or false"):
        layout_of({"images_outside": "yes"})


@pytest.mark.parametrize("cell", ["1_0", "1_000.5", "0x10", "1e_3", "_1", "1__0"])
def test_what_is_a_number_in_python_alone_is_none_in_a_cell(cell):
    assert number(cell) is None and seconds(cell) is None
    assert number("10") == 10 and number("1e3") == 1000


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e151"])
@pytest.mark.parametrize("column", ["x", "a"])
def test_numbers_that_cannot_be_squared_are_refused_with_their_place(tmp_path, value, column):
    row = {"x": "1", "a": "1"} | {column: value}
    (tmp_path / "t.csv").write_text(f"x,a\n1,2\n{row['x']},{row['a']}\n", encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"row 3, (states|observations): -?1e\+\d+ is no measurement; the limit is 1e\+150",
    ):
        read(tmp_path / "t.csv", Layout(states=["x"], observations=["a"]))
