"""The rows that a job measures."""

from dataclasses import replace

from loadtest.common.job import Job
from loadtest.engine.long_rows import make_long_rows
from loadtest.engine.rows import Row, make_rows, select_rows


def rows_of(job: Job) -> list[Row]:
    rows = make_rows(job.scale, job.quick) + (make_long_rows(job.scale) if job.long else [])
    return [replace(row, repeats=max(job.repeats, row.repeats)) for row in select_rows(rows, job.rows)]
