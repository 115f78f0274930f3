from kbf.filters.selection import (
    auto as auto,
    catalogue as catalogue,
    cross_validation as cross_validation,
    drift as drift,
    ratio_mean as ratio_mean,
    stacking as stacking,
)
