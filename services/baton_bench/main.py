"""`baton bench serve`: finds the targets, runs every load on each, and reports the results."""

import asyncio
import contextlib
import importlib.util
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_bench.answer import Answer
from baton_bench.dialect import Conversation
from baton_bench.errors import BenchError
from baton_bench.html_report import html_report
from baton_bench.load import run_load
from baton_bench.plan import Plan, Room, make_plans
from baton_bench.pod_watch import PodWatch
from baton_bench.report import Report
from baton_bench.settings import BenchSettings
from baton_bench.table import console_table, header, notes, rows, widths
from baton_bench.target import Target, find_target

_LEAST_TOKEN_RANGE = 250


def main(settings: BenchSettings) -> int:
    """Return the exit code: 1 when a load had no answer at all. Raises BenchError.

    Ctrl-C or an error ends the run; the loads that are done are reported.
    """
    progress = Console(stderr=True, highlight=False)
    report = Report(settings)
    code = 130
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _run(measure(report, lambda line: progress.print(line, markup=False)))
            code = 0 if report.good else 1
    finally:
        if report.results:
            _publish(report, progress)
    return code


def _publish(report: Report, progress: Console) -> None:
    """Write the files that the user asked for, then the table. A terminal may fail after hours of measurement."""
    settings = report.settings
    for path, make in ((settings.json_file, _json), (settings.html_file, html_report)):
        if path is not None:
            _write(path, make(report))
            progress.print(f"written: {path}", markup=False)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = widths([header(report), *rows(report)])
    console.print(console_table(report))
    for note in notes(report):
        console.print(note, markup=False, soft_wrap=True)


async def measure(report: Report, say: Callable[[str], None]) -> None:
    """Run every load on every target. say: gets a line for each step. Raises BenchError."""
    settings = report.settings
    report.targets = [await find_target(name, url, settings) for name, url in settings.targets]
    watches = {name: await _watch(name, url) for name, url in settings.admin_urls.items()}
    # All targets share these values, so that each gets the same requests.
    plans = make_plans(settings, _common_room(report.targets))
    for plan in plans:
        if not plan.sessions:
            raise BenchError(f"{plan.name}: no requests ({plan.dropped} were too long for the model)")
    for target in report.targets:
        say(f"{target.name}: {target.url}, prompts as {target.dialect.form}, model {target.dialect.model}")
        await _warm_up(target, plans[0], settings)
        for plan in plans:
            say(f"{target.name}: {plan.name}: {plan.requests} requests in {plan.seconds:.0f} s")
            report.results.append(await run_load(target, plan, settings, watches.get(target.name)))


def _common_room(targets: list[Target]) -> Room:
    lengths = [target.max_model_len for target in targets if target.max_model_len]
    tokens = [target.highest_token for target in targets if target.highest_token]
    return Room(min(lengths, default=None), min(tokens, default=_LEAST_TOKEN_RANGE))


async def _watch(name: str, url: str) -> PodWatch:
    watch = PodWatch(url)
    try:
        await watch.check()
    except (OSError, ValueError) as error:
        raise BenchError(f"{name}: --admin-url {url} does not answer at /pods: {error}") from None
    return watch


async def _warm_up(target: Target, plan: Plan, settings: BenchSettings) -> None:
    """Warm a target up: compilation, graph capture and allocation at first use are not steady operation."""
    for session in plan.sessions[: settings.warmup]:
        turn = session.turns[0]
        conversation = Conversation(target.dialect.form)
        conversation.say(turn.tokens[::-1])  # reversed, so that the measured prompt is not cached
        answer = Answer(0.0, conversation.tokens, turn.outputs)
        request = target.request(conversation, answer)
        await target.send(request, conversation, answer, 0.0, settings.request_timeout_s)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if it is installed, because a chunk then costs the client less."""
    if importlib.util.find_spec("uvloop") is None:
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


def _json(report: Report) -> str:
    return json.dumps(report.json(), indent=1) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from None
