from kbf.filters.selection import (
    auto as auto,
    averaging as averaging,
    cross_validation as cross_validation,
    drift as drift,
    ratio_mean as ratio_mean,
    requirements as requirements,
)
