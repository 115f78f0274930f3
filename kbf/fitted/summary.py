"""What a fitted filter is and can do, as dictionaries, DataFrames and rows of a table."""

import os
from functools import cached_property
from typing import Any

from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.evaluation.calibration import Calibration
from kbf.filters.protocols import (
    WITH_MEMORY,
    WITH_SMOOTHER,
    allows_missing_sensors,
    control_components,
)
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.requirements import REQUIREMENTS, can_smooth, why_not_exported
from kbf.fitted.checkpoint import Trained
from kbf.fitted.compatibility import Reference, reference_of
from kbf.fitted.estimates import Estimates
from kbf.fitted.model import compared_by, inner_filter
from kbf.fitted.results import Result, Source
from kbf.runtime.html_repr import table

# Columns of each side that a representation shows.
MAX_SHOWN_COLUMNS = 8


# What a filter may be able to do, by name.
CAPABILITIES = (
    *("smooth", "append", "export", "missing_sensors", "controls", "intervals", "alarms"),
)


class Summary:
    """What a fitted filter is: its model, columns, capabilities, candidates and held-out scores.

    Attributes:
        trained: model, filter, calibration and monitor (`kbf.fitted.checkpoint.Trained`).
        schema: names and kinds of the columns.
        config: the configuration that it was fitted with.
    """

    def __init__(self, trained: Trained) -> None:
        """Wrap a trained model; `kbf.load` and `kbf.fit` make one."""
        self.trained: Trained = trained
        self.schema: ColumnSchema = trained.module.column_schema()
        self.config: dict[str, Any] = trained.module.config
        self._smoothers: dict[int | None, Calibration | None] = {}
        self._structure: Any = None

    @cached_property
    def reference(self) -> Reference:
        """The ranges of the training data, with which new recordings are compared."""
        return reference_of(self.trained)

    @property
    def model(self) -> Any:
        """The filter, without scaling and encoders."""
        return inner_filter(self.trained.filter)

    @property
    def model_name(self) -> str:
        """The name of the selected model; those of an average are joined by ``+``."""
        net: Any = self.trained.module.net
        if isinstance(net, ModelSelection):
            return "+".join(net.used())
        return str(self.trained.module.config["model"].get("name", type(net).__name__))

    @property
    def columns(self) -> dict[str, list[str]]:
        """Names of the columns of states, observations and controls."""
        sides = {side: self.schema.columns(side) for side in ("states", "observations")}
        return {**sides, "controls": list(self.schema.controls)}

    @property
    def time_step(self) -> float | None:
        """The median time between two steps of the training, in seconds; None without times."""
        return (self.config.get("data") or {}).get("time_step")

    @property
    def capabilities(self) -> dict[str, bool]:
        """What the filter can do, by the names of `CAPABILITIES`."""
        filter: Any = self.trained.filter
        return {
            "smooth": can_smooth(filter),
            "append": inner_filter(filter) is not self.trained.module.net,
            "export": why_not_exported(filter) is None,
            "missing_sensors": allows_missing_sensors(filter),
            "controls": control_components(filter) > 0,
            "intervals": self.trained.calibration is not None,
            "alarms": self.trained.monitor is not None,
        }

    @property
    def candidates(self) -> Any:
        """The candidates of the model selection, a DataFrame; empty where none were compared.

        Columns: candidate, nmse (on held-out blocks), standard_error (of the NMSE), weight (in the
        selected filter), seconds, and note: why a candidate has no NMSE. Candidates without one
        come last.
        """
        import pandas as pd

        net: Any = self.trained.module.net
        if isinstance(net, ModelSelection):
            weights = dict(zip(net.models, net.weights.mean(1).tolist(), strict=False))
        else:  # of model=auto
            weights = {self.config["model"].get("name"): 1.0}
        rows = [
            (name, nmse, error, weights.get(name, 0.0), seconds, note)
            for name, nmse, error, seconds, note in compared_by(self.trained.module)
        ]
        names = ["candidate", "nmse", "standard_error", "weight", "seconds", "note"]
        frame = pd.DataFrame(rows, columns=names)
        numbers = dict.fromkeys(("nmse", "standard_error", "weight", "seconds"), float)
        return frame.astype(numbers).sort_values("nmse", ignore_index=True, kind="stable")

    @property
    def structure(self) -> Any:
        """What the training recordings show, a DataFrame with a row and a sentence for each.

        Sensors that are late, held, stick, fail or drift; regimes and jumps; noises; and why the
        filter was selected (`kbf.fitted.structure.structure_of`). The first use takes some seconds.
        """
        if self._structure is None:
            from kbf.fitted.structure import structure_of

            self._structure = structure_of(self.trained)
        return self._structure.copy()

    def report(
        self, path: str | os.PathLike[str], *, trials: bool = True, model: str | None = None
    ) -> list[str]:
        """Write what was found as one HTML file with pictures inside; returns its sentences.

        Args:
            path: of the file.
            trials: also fit a quick filter without each sensor and to fewer rows
                (`kbf.fitted.trials`).
            model: of these fits, None for the best of `kbf.fitted.trials.QUICK`.

        Raises:
            ValueError: an unknown model.
        """
        from kbf.fitted.report import write_report

        return write_report(self, path, trials=trials, model=model)

    @property
    def held_out(self) -> Any:
        """Scores of each state column on held-out training steps, a DataFrame.

        Columns: rmse, nmse, coverage_95 (`kbf.evaluation.calibration.HeldOut`). Empty for filters
        that were not calibrated.
        """
        import pandas as pd

        names, found = ["rmse", "nmse", "coverage_95"], self.trained.held_out
        if found is None:
            return pd.DataFrame(columns=names)
        columns = dict(zip(names, map(Tensor.numpy, found), strict=True))
        return pd.DataFrame(columns, index=self.schema.parts())

    def _cannot(self, what: str) -> str:
        """Why a capability is lacking, and what to do: the main model may have it, or another."""
        if isinstance(self.trained.module.net, ModelSelection) and what in REQUIREMENTS:
            advice = f"kbf.fit(..., require=[{what!r}]) selects among models that can"
        else:
            able = {"smooth": WITH_SMOOTHER, "append": WITH_MEMORY}[what]
            advice = f"models that can are {', '.join(able)}"
        return f"the model {self.model_name} cannot {what}: {advice}"

    def __repr__(self) -> str:
        rows = (f"  {name}: {value}" for name, value in self._rows())
        return "\n".join([f"FittedFilter({self.model_name})", *rows])

    def _repr_html_(self) -> str:
        return table(f"FittedFilter: {self.model_name}", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """Names and values that the representations show."""
        module, schema = self.trained.module, self.schema
        units, rows = (module.config.get("data") or {}).get("units") or {}, []
        for side in ("states", "observations", "controls"):
            names = list(schema.controls) if side == "controls" else schema.columns(side)
            shown = [f"{name} [{units[name]}]" if name in units else name for name in names]
            if len(shown) > MAX_SHOWN_COLUMNS:
                shown = [*shown[:MAX_SHOWN_COLUMNS], f"... ({len(names)})"]
            if shown or side == "observations":
                rows.append((side, ", ".join(shown) or "images"))
        memory = module.memory.recordings()
        steps = sum(len(each.states) for each in memory)
        plural = "" if len(memory) == 1 else "s"
        rows.append(("training", f"{steps:,} steps in {len(memory)} recording{plural}"))
        found = self.trained.held_out
        for k, name in enumerate([] if found is None else schema.parts()):
            assert found is not None
            unit = f" {units[name]}" if name in units else ""
            text = f"RMSE {found.rmse[k]:.4g}{unit}, NMSE {found.nmse[k]:.3g}"
            if bool(found.coverage[k].isfinite()):
                text += f", intervals of 95 % contain {100 * float(found.coverage[k]):.1f} %"
            rows.append((f"held out, {name}", text))
        able = [name for name, can in self.capabilities.items() if can]
        return [*rows, ("capabilities", ", ".join(able) or "none")]

    def estimates(self, result: Result, source: Source, **settings: Any) -> Estimates:
        """Return results in the columns of this filter, with its bounds and units.

        Arguments as of `Estimates`; ``calibration`` is that of the filter unless given, that of
        forecasts where the result has horizons.
        """
        data = self.trained.module.config.get("data") or {}
        bounds = {name: tuple(ends) for name, ends in (data.get("bounds") or {}).items()}
        source = source._replace(bounds=bounds, units=data.get("units") or {})
        ahead = None if result.horizons is None else self.trained.forecasts
        settings.setdefault("calibration", ahead or self.trained.calibration)
        return Estimates(result, self.schema, source=source, **settings)
