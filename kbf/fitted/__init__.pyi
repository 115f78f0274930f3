from kbf.fitted import (
    append as append,
    buffers as buffers,
    checkpoint as checkpoint,
    held_out_calibration as held_out_calibration,
    model as model,
    settings as settings,
)
