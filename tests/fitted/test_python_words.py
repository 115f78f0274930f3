"""Messages of `kbf.fit` name its arguments, with values as Python has them."""

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.fitted.python_words import python_words


@pytest.mark.parametrize(
    ("setting", "argument"),
    [
        ("data.bounds={RUL: [null, 125]} keeps", "bounds={'RUL': [None, 125]} keeps"),
        ("; data.allow_missing_sensors=true uses", "; allow_missing_sensors=True uses"),
        ("(data.control_timing=from)", "(control_timing='from')"),
        ("data.latency={CO(GT): 0.4} moves", "latency={'CO(GT)': 0.4} moves"),
        ("data.angles=[a b] data.angle_unit=degrees", "angles={'a b': 'degrees'}"),
        ("data.sort_by_time=true", "reading={'sort_by_time': True}"),
        ("as in data.text_encoding=latin-1", "as in reading={'text_encoding': 'latin-1'}"),
        ("/a/data.csv, row 3: data.path", "/a/data.csv, row 3: path"),
    ],
)
def test_settings_become_arguments(setting, argument):
    assert python_words(setting) == argument


def test_the_arguments_of_a_warning_are_accepted():
    """What a message proposes is pasted into the call."""
    rng = np.random.default_rng(0)
    angle = (5 * np.cumsum(rng.normal(1, 1, 400))) % 360
    seen = np.where(rng.random(400) < 0.1, -999, 20 + rng.normal(size=400))
    frame = pd.DataFrame({"h": angle, "a": seen, "b": np.sin(np.deg2rad(angle))})
    columns = {"states": ["h"], "observations": ["a", "b"]}
    report = kbf.check(frame, **columns, test=0.0)
    assert len(report.warnings) == 2
    proposed = [text.split(": ", 2)[-1] for text in report.warnings]
    arguments = eval(f"dict({', '.join(sorted(proposed))})")
    assert arguments == {"angles": {"h": "degrees"}, "missing": [-999]}
    assert kbf.check(frame, **columns, **arguments, test=0.0, allow_missing_sensors=True) != report
