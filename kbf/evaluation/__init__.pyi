from kbf.evaluation import (
    alarms as alarms,
    calibration as calibration,
    floors as floors,
    metrics as metrics,
    score as score,
    scoring_rules as scoring_rules,
)
