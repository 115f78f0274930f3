from kbf.commands.support import (
    baseline_report as baseline_report,
    console as console,
    console_tables as console_tables,
    metric_descriptions as metric_descriptions,
    resumable_jobs as resumable_jobs,
    row_writers as row_writers,
    search_report as search_report,
    smoothing_scores as smoothing_scores,
    stream_reader as stream_reader,
    worker_pool as worker_pool,
    workshop as workshop,
)
