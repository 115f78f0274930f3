from kbf.filters.kernel.update import (
    likelihood as likelihood,
    nearest_draws as nearest_draws,
    per_sensor as per_sensor,
    rule as rule,
)
