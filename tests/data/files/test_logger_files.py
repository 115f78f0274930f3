"""Tables as loggers and spreadsheets write them, each beside the plain table with equal numbers."""

import bz2
import gzip
import lzma
import re
import unicodedata
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch

from kbf.data.files.layout import Layout, layout_of
from kbf.data.files.read import read, read_all

PLAIN = "t,x,a,b\n0.0,1.5,2,1234.5\n0.1,2.5,3,12\n0.2,3.5,4,1250.25\n"
ROLES = {"states": ["x"], "observations": ["a", "b"]}


def numbers_of(path, text, encoding="utf-8", **settings):
    path.write_bytes(text.encode(encoding))
    (found,) = read(path, layout_of({**ROLES, "time": "t", **settings})).recordings
    return torch.cat([found.times[:, None], found.states, found.obs], 1)


@pytest.fixture
def plain(tmp_path):
    return numbers_of(tmp_path / "plain.csv", PLAIN)


WRITTEN = {
    "the delimiter in the first line": ("sep=;\n" + PLAIN.replace(",", ";"), {}),
    "a delimiter that is not guessed": ("sep=|\n" + PLAIN.replace(",", "|"), {}),
    "lines before the header": ("Logger 7\nstart: 12,5\n\n" + PLAIN, {"skip_lines": 2}),
    "a row of units": (PLAIN.replace("b\n", "b\ns,m,V,mV\n"), {"units_row": True}),
    "quoted units": (PLAIN.replace("b\n", 'b\n"s","m","V","m,V"\n'), {"units_row": True}),
    "comments": (
        "# made by\n" + PLAIN.replace("\n0.1", "\n  # pause, here\n0.1"),
        {"comment": "#"},
    ),
    "a pipe": (PLAIN.replace(",", "|"), {}),
    "spaces": (PLAIN.replace(",", " "), {}),
    "columns aligned by spaces": (PLAIN.replace(",", "   ").replace("\n", "\n  "), {}),
    "quoted decimal commas": (
        "\n".join(
            ",".join(f'"{cell.replace(".", ",")}"' for cell in line.split(","))
            for line in PLAIN.splitlines()
        ),
        {"decimal": ","},
    ),
    "decimal commas": (PLAIN.replace(",", ";").replace(".", ","), {}),
    "thousands by points": (
        PLAIN.replace(",", ";").replace(".", ",").replace("1234", "1.234").replace("1250", "1.250"),
        {"thousands": "."},
    ),
    "quoted thousands": (
        PLAIN.replace("1234.5", '"1,234.5"').replace("1250.25", '"1,250.25"'),
        {"thousands": ","},
    ),
    "Swiss thousands": (
        PLAIN.replace("1234", "1'234").replace("1250", "1'250"),
        {"thousands": "'"},
    ),
    "unused columns with empty names": (PLAIN.replace("\n", ",,\n"), {}),
    "unused cells in all rows": (PLAIN.replace("\n", ",,\n").replace("b,,", "b"), {}),
    "empty rows of a spreadsheet": (PLAIN + ",,,\n,,,\n\n", {}),
    "rows of a Mac": (PLAIN.replace("\n", "\r"), {}),
    "missing values in another spelling": (
        PLAIN.replace(",", ";").replace(".", ",") + "0,3;NuLL;4;5,5\n0,4;1;4;5,5\n",
        {},
    ),
    "missing values as loggers write them": (
        PLAIN + "".join(f"0.5,{cell},4,5\n" for cell in ("#N/A", "-", "--", "?", "1.#QNAN")),
        {},
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_tables_are_read_as_they_are_written(tmp_path, plain, name):
    text, settings = WRITTEN[name]
    found = numbers_of(tmp_path / "written.csv", text, **settings)
    assert torch.equal(found[:3], plain)


def test_a_file_without_a_header(tmp_path, plain):
    rows = PLAIN.partition("\n")[2]
    settings = {"header": False, "time": "c1", "states": ["c2"], "observations": ["c3", "c4"]}
    for text in (
        rows,
        "sep=;\n" + rows.replace(",", ";"),
        rows.replace(",", ";").replace(".", ","),
    ):
        assert torch.equal(numbers_of(tmp_path / "a.csv", text, **settings), plain)
    with pytest.raises(ValueError, match=r"first line must name the columns.*data.header=false"):
        numbers_of(tmp_path / "a.csv", rows)
    # a table with a header is not read without one
    with pytest.raises(ValueError, match="'x' is no number"):
        numbers_of(tmp_path / "a.csv", PLAIN, **settings)


SUFFIXES = ["csv.gz", "csv.bz2", "csv.xz", "csv.zip", "zip", "CSV", "dat"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_archives_and_names_in_capitals(tmp_path, plain, suffix):
    path = tmp_path / f"Messung [1] Kälte {3}.{suffix}"
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    if (last := suffix.split(".")[-1]) in compress:
        path.write_bytes(compress[last](PLAIN.encode()))
    elif suffix.endswith("zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("rec/rec.csv", PLAIN)
            archive.writestr("__MACOSX/rec/._rec.csv", "of macOS")
    else:
        path.write_text(PLAIN)
    (found,) = read_all(path, layout_of({**ROLES, "time": "t"})).recordings
    assert torch.equal(found.obs, plain[:, 2:])


def test_archives_of_several_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", PLAIN)
        archive.writestr("b.csv", PLAIN)
    with pytest.raises(ValueError, match="holds 2 files; a table is one file: unpack them"):
        read_all(tmp_path / "a.zip", layout_of(ROLES))
    (tmp_path / "b.zip").write_text(PLAIN)
    with pytest.raises(ValueError, match=r"b.zip is damaged"):
        read_all(tmp_path / "b.zip", layout_of(ROLES))


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("# made by\n" + PLAIN, "data.comment='#'"),
        ("Logger 7\nno 3\n" + PLAIN, "data.skip_lines=2"),
        (PLAIN.replace("b\n", "b\ns,m,V,mV\n"), "data.units_row=true"),
        (PLAIN.replace("1.5", '"1,5"'), "data.decimal=','"),
    ],
)
def test_errors_name_the_setting_of_the_file(tmp_path, text, setting):
    with pytest.raises(ValueError, match=re.escape(setting)):
        numbers_of(tmp_path / "a.csv", text)


def test_letters_of_two_characters_are_those_of_one(tmp_path):
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, PLAIN.replace("x", "Größe"))
        (tmp_path / "a.csv").write_text(text)
        for name in ("NFC", "NFD"):
            roles = {**ROLES, "states": [unicodedata.normalize(name, "Größe")]}
            (found,) = read(tmp_path / "a.csv", layout_of(roles)).recordings
            assert found.states is not None and found.states[:, 0].tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_letters_of_two_characters_in_other_files(tmp_path, form):
    columns = {"Größe": [1.5, 2.5, 3.5], "a": [1.0, 2.0, 3.0], "b": [3.0, 2.0, 1.0]}
    stored = {unicodedata.normalize(form, name): values for name, values in columns.items()}
    pd.DataFrame(stored).to_parquet(tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in stored.items()})
    for name in ("a.parquet", "a.npz"):
        roles = {**ROLES, "states": [unicodedata.normalize("NFD", "Größe")]}
        (found,) = read(tmp_path / name, layout_of(roles)).recordings
        assert found.states is not None and found.states[:, 0].tolist() == [1.5, 2.5, 3.5]


def test_a_number_that_may_be_a_thousand_is_asked_for(tmp_path):
    rows = [f"{k};{cell};0,5" for k, cell in enumerate(["1,234", "2,500", "999", "12,001"] * 3)]
    text = "x;a;b\n" + "\n".join(rows) + "\n"
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"column a: 1,234 may be a thousand or a decimal: set"):
        read(path, layout_of(ROLES))
    (found,) = read(path, layout_of({**ROLES, "decimal": ","})).recordings
    assert found.obs[0].tolist() == [1.234, 0.5]
    # decimals that are written in full, or shortened, are ordinary
    for cells in (["1,234", "2,500", "0,999"], ["1,234", "2,5", "999"], ["1.234", "2", "1234"]):
        rows = [f"{k};{cell};0,5" for k, cell in enumerate(cells * 9)]
        decimal = "," if "," in cells[0] else "."
        text = "x;a;b\n" + "\n".join(rows).replace(",", decimal)
        path.write_text(text)
        (found,) = read(path, layout_of(ROLES)).recordings
        assert float(found.obs[0, 0]) == 1.234
    path.write_text('x,a,b\n1,"1,234,567",3\n2,5,6\n')
    with pytest.raises(ValueError, match=r"row 2, column a: '1,234,567' is no number; data.thous"):
        read(path, layout_of(ROLES))


DATES = {
    "Date and Time": ("10/03/2004,18.00.00", "%d/%m/%Y %H.%M.%S", ["Date", "Time"]),
    "American": ("03/10/2004,6:00:00 PM", "%m/%d/%Y %I:%M:%S %p", ["Date", "Time"]),
    "ISO in two columns": ("2004-03-10,18:00:00", None, ["Date", "Time"]),
    "digits only": ("20040310180000,x", "%Y%m%d%H%M%S", "Date"),
    "digits in two columns": ("20040310,180000", "%Y%m%d %H%M%S", ["Date", "Time"]),
}


def test_the_error_about_dates_names_a_format_that_reads_them(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Date,x,a,b\n10/03/2004 18.00.00,1,2,3\n10/03/2004 19.00.00,2,3,4\n")
    with pytest.raises(ValueError, match=re.escape("date_format='%d/%m/%Y %H.%M.%S'")):
        read(path, layout_of({**ROLES, "time": "Date"}))
    named = layout_of({**ROLES, "time": "Date", "date_format": "%d/%m/%Y %H.%M.%S"})
    assert len(read(path, named).recordings[0].times) == 2


@pytest.mark.parametrize("name", DATES)
def test_dates_as_they_are_written(tmp_path, name):
    cells, form, columns = DATES[name]
    later = cells.replace("18", "19").replace("6:", "7:")
    text = f"Date,Time,x,a,b\n{cells},1,2,3\n{later},2,3,4\n"
    path = tmp_path / "a.csv"
    path.write_text(text)
    layout = layout_of({**ROLES, "time": columns, "date_format": form})
    (found,) = read(path, layout).recordings
    start = pd.Timestamp("2004-03-10 18:00").timestamp()
    assert found.times.tolist() == [start, start + 3600]
    # the same DataFrame has the same times
    from kbf.data.files.in_memory import contents_of

    (again,) = contents_of(pd.read_csv(path, dtype={"Time": str}), layout).recordings
    assert torch.equal(again.times, found.times)


def test_dates_that_are_not_in_the_format_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Date,x,a,b\n10/03/2004,1,2,3\n2004-03-11,2,3,4\n")
    with pytest.raises(ValueError, match=r"row 2, column Date: '10/03/2004' is no number and no d"):
        read(path, layout_of({**ROLES, "time": "Date"}))
    with pytest.raises(ValueError, match=r"row 3, column Date: '2004-03-11' is no date in the f"):
        read(path, layout_of({**ROLES, "time": "Date", "date_format": "%d/%m/%Y"}))


def test_parquet_has_dates_in_two_columns(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"d": ["10.3.2004", "10.3.2004"], "t": ["18:00", "18:30"], "x": [1.0, 2.0]}
    parquet.write_table(arrow.table({**table, "a": [1, 2], "b": [2, 3]}), tmp_path / "a.parquet")
    layout = layout_of({**ROLES, "time": ["d", "t"], "date_format": "%d.%m.%Y %H:%M"})
    (found,) = read(tmp_path / "a.parquet", layout).recordings
    assert found.times.diff().tolist() == [1800.0]


def test_rows_out_of_order_are_refused_or_sorted(tmp_path):
    from kbf.data.files.dataset import FileData

    lines = PLAIN.splitlines()
    path = tmp_path / "a.csv"
    path.write_text("\n".join([lines[0], lines[2], lines[1], lines[3]]))
    with pytest.raises(ValueError, match=r"row 3: time 0 after 0.1; .* data.sort_by_time=true"):
        FileData(path, time="t", test=0, **ROLES)
    data = FileData(path, time="t", test=0, sort_by_time=True, **ROLES)
    assert data.train[0].states.flatten().tolist() == [1.5, 2.5, 3.5]
    assert data.recordings[0].place(0) == f"{path}, row 3"
    path.write_text(PLAIN.replace("0.1", "0.0"))  # two rows of one time have no order
    with pytest.raises(ValueError, match="times must increase"):
        FileData(path, time="t", test=0, sort_by_time=True, **ROLES)
    with pytest.raises(ValueError, match="sort_by_time needs time stamps"):
        FileData(path, test=0, sort_by_time=True, **ROLES)


NAMES = ["CO(GT)", "acc[x]", "Druck 1 (hPa)", "Größe", "温度", "1", "a,b", 'q"q']


@pytest.mark.parametrize("name", NAMES)
def test_names_of_all_kinds(tmp_path, name):
    folder = tmp_path / "Messung [3] 温度"
    folder.mkdir()
    path = folder / "läuft (1).csv"
    frame = pd.DataFrame({"x": [1.0, 2.0], name: [3.0, 4.0], "other": [5.0, 6.0]})
    frame.to_csv(path, index=False)
    layout = layout_of({"states": ["x"], "observations": [name]})
    assert read_all(path, layout).recordings[0].obs.flatten().tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match="there is no column") as caught:
        read_all(path, layout_of({"states": ["x"], "observations": ["othr"]}))
    assert name in str(caught.value) and "did you mean 'other'" in str(caught.value)


def test_brackets_are_part_of_patterns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,acc[x],acc[y],accx\n1,2,3,4\n2,3,4,5\n")
    found = read(path, layout_of({"states": ["x"], "observations": ["acc[*]"]}))
    assert found.observations == ["acc[x]", "acc[y]"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("thousands", ";"), ("decimal", "x"), ("skip_lines", -1), ("skip_lines", "2"),
        ("units_row", 1), ("header", "no"), ("comment", ""), ("date_format", 3),
    ],
)  # fmt: skip
def test_settings_of_texts_are_checked(setting, value):
    with pytest.raises(ValueError, match=f"data.{setting} must be"):
        layout_of({setting: value})


def test_one_mark_has_one_meaning():
    with pytest.raises(ValueError, match="are both ','"):
        layout_of({"decimal": ",", "thousands": ","})


def test_masks_are_zero_or_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,a,m\n1,2,1\n2,3,0\n3,4,\n")
    layout = Layout(states=["x"], observations=["a"], mask="m")
    assert read(path, layout).recordings[0].mask.tolist() == [True, False, False]
    path.write_text("x,a,m\n1,2,1\n2,3,0.7\n3,4,\n")
    with pytest.raises(ValueError, match=r"row 3, column m: a mask is 0 or 1, got 0.7"):
        read(path, layout)
    arrays = {"states": np.zeros((3, 1)), "obs": np.ones((3, 1)), "mask": np.array([1, 2, 0])}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"a mask is 0 or 1, that of step 1 is 2"):
        read(tmp_path / "a.npz", Layout())
    np.savez(tmp_path / "a.npz", **arrays | {"mask": np.array([1.0, 1, 0])})
    assert read(tmp_path / "a.npz", Layout()).recordings[0].mask.tolist() == [True, True, False]


def test_dates_are_no_measurements_at_either_door(tmp_path):
    from kbf.data.files.in_memory import contents_of

    dates = pd.date_range("2026-01-01", periods=3, freq="s")
    frame = pd.DataFrame({"x": [1.0, 2.0, 4.0], "a": dates, "b": [1.0, 2.0, 3.0], "t": dates})
    layout = layout_of({**ROLES, "time": "t"})
    frame.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(ValueError, match=r"column a: '2026-01-01.*' is no number"):
        read(tmp_path / "a.csv", layout)
    with pytest.raises(ValueError, match=r"column a: it holds dates, not numbers"):
        contents_of(frame, layout)
    if pytest.importorskip("pyarrow"):
        frame.to_parquet(tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"column a: it holds timestamp.*, not numbers"):
            read(tmp_path / "a.parquet", layout)
    # as the time they are read
    for each in (frame, frame.assign(t=frame.t.dt.tz_localize("Europe/Berlin"))):
        (found,) = contents_of(each.assign(a=1.0), layout).recordings
        assert found.times.diff().tolist() == [1.0, 1.0]


def test_true_and_false_are_one_and_zero(tmp_path):
    text = "t,z,a,b\n0,1,True,true\n1,2,False,\n2,3,True,FALSE\n3,4,True,.5\n"
    path = tmp_path / "door.csv"
    path.write_text(text)
    roles = {"states": ["z"], "observations": ["a", "b"], "time": "t"}
    [found] = read(path, layout_of(roles)).recordings
    expected = torch.tensor([[1, 1], [0, torch.nan], [1, 0], [1, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(found.obs, expected, equal_nan=True)
    path.write_text(text.replace("\n1,2", "\nTrue,2"))
    with pytest.raises(ValueError, match="row 3, column t: 'True' is no number"):
        read(path, layout_of(roles))
    path.write_text("t,z,a,b\nFalse,1,1,2\nTrue,2,3,4\n")  # pandas reads a column of bool
    with pytest.raises(ValueError, match="row 2, column t: 'False' is no number"):
        read(path, layout_of(roles))
