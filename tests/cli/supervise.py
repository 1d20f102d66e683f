"""Supervises scripted children, so that tests can signal a supervisor from outside: `supervise.py JSON`.

The JSON holds `stages`: lists of children, each {name, code, ready_port?, grace_s?}; `code` is a Python program.
"""

import asyncio
import json
import sys

from baton_cli.child import Child
from baton_cli.display import display_for
from baton_cli.log_line import LogLevel
from baton_cli.ports import Address
from baton_cli.spec import ChildSpec
from baton_cli.supervisor import Supervisor


async def _main(plan: dict) -> int:
    specs = [[_spec(**child) for child in stage] for stage in plan["stages"]]
    names = [spec.name for stage in specs for spec in stage]
    with display_for(names, LogLevel(plan.get("level", "info"))) as display:
        stages = [[Child(spec, display) for spec in stage] for stage in specs]
        return await Supervisor(stages, display, "GREETING").run()


def _spec(name: str, code: str, ready_port: int | None = None, grace_s: float = 5.0) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-I", "-S", "-u", "-c", code, f"child-{name}"),
        ready_at=None if ready_port is None else Address("127.0.0.1", ready_port),
        grace_s=grace_s,
    )


sys.exit(asyncio.run(_main(json.loads(sys.argv[1]))))
