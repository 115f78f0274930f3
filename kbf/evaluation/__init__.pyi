from kbf.evaluation import (
    calibration as calibration,
    floors as floors,
    metrics as metrics,
    monitor as monitor,
    score as score,
    scoring_rules as scoring_rules,
    statistics as statistics,
)
