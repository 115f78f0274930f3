from kbf.training import (
    callbacks as callbacks,
    datamodule as datamodule,
    encoder_datamodule as encoder_datamodule,
    encoder_stage as encoder_stage,
    figure_logging as figure_logging,
    filter_stage as filter_stage,
    fit as fit,
    metric_logging as metric_logging,
    pixel_choice as pixel_choice,
    processes as processes,
)
