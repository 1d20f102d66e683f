"""The tasks of the benchmark. Each runs in a process of its own: tasks.py JOB_FILE EVENTS_FILE. It writes events, one
line of JSON each."""

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from loadtest.common.job import Job
from loadtest.engine import device
from loadtest.engine.device import Card
from loadtest.engine.engines import ENGINES, MeasuredEngine, Ours
from loadtest.engine.job_rows import rows_of
from loadtest.engine.rows import warm_up_rows

Tell = Callable[..., None]

# Kept until the process ends: the end of an engine waits for NCCL, whose operations are in the CUDA graphs of ranks.
_engines: list[MeasuredEngine] = []


def prepare(job: Job, tell: Tell) -> None:
    """Measure the device, report its name, and write the missing weights."""
    measured = device.measure_card()
    used = Card(job.bandwidth or measured.bandwidth, job.arithmetic or measured.arithmetic)
    rates = {"measured": asdict(measured), "used_for_limits": asdict(used)}
    tell("card", card={**device.describe(), "itemsize": device.itemsize(), **rates})
    if job.make_weights:
        from loadtest.common.random_weights import INDEX, write_random_weights

        # The index is written last, so its presence means that the weights are complete.
        folder = Path(job.model)
        if not (folder / INDEX).exists():
            began = time.perf_counter()
            write_random_weights(folder, job.seed)
            tell("weights", seconds=time.perf_counter() - began)


def run_rows(job: Job, tell: Tell) -> None:
    """Start an engine, warm it up, and report every row."""
    began = time.perf_counter()
    engine = ENGINES[job.engine](job)
    _engines.append(engine)
    tell("ready", seconds=time.perf_counter() - began, settings=engine.settings)
    for row in filter(None, map(engine.adapt, warm_up_rows(job.scale))):
        engine.generate(row.inputs, row.outputs)
    # As in production: objects that exist by now stay, so the garbage collector need not scan them again.
    gc.collect()
    gc.freeze()
    for row in filter(None, map(engine.adapt, rows_of(job))):
        try:
            tell("row", key=row.key, samples=row.measure(engine.generate))
        except Exception as error:
            tell("row", key=row.key, error=_one_line(error))


def profile(job: Job, tell: Tell) -> None:
    """Trace steps of Baton's engine and report how their time is spent."""
    from loadtest.engine.step_profile import profile_steps

    ours = Ours(job)
    _engines.append(ours)
    tell("ready", seconds=None, settings=ours.settings)
    for report in profile_steps(ours, job):
        tell("profile", report=report)


class Warnings(logging.Handler):
    """Reports what Baton's engine warns of: a kernel that is not used costs time."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("warning", text=record.getMessage())


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


def main(job_path: str, events_path: str) -> None:
    def tell(event: str, **facts: Any) -> None:
        with open(events_path, "a") as sink:
            sink.write(json.dumps({"event": event, **facts}) + "\n")

    logging.getLogger("baton_engine").addHandler(Warnings(tell))
    job = Job.load(Path(job_path))
    try:
        {"prepare": prepare, "rows": run_rows, "profile": profile}[job.task](job, tell)
    except Exception as error:
        traceback.print_exc()
        tell("error", error=_one_line(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # The interpreter's own end would end the engine as well.
    os._exit(0)
