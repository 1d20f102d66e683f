"""Send Baton requests that OpenAI's specification allows and requests that it forbids, and check the answers."""

import argparse
import hashlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import requests
from schemathesis import Case

from .answers import Answers, mended
from .cases import for_each_case
from .local_baton import local_baton

TIMEOUT_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("openapi", metavar="OPENAPI", type=Path, help="OpenAI's specification, as JSON")
    parser.add_argument("--baton", default="baton", help="the command that starts Baton")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    spec = mended(json.loads(options.openapi.read_bytes()))
    answers = Answers(spec)
    statuses: Counter[tuple[str, str, int]] = Counter()
    failures: dict[str, str] = {}
    digest = hashlib.sha256()
    started = time.monotonic()
    # Else nobody would stop Baton when this is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    with local_baton(options.baton) as address, requests.Session() as session:

        def test(case: Case, path: str, method: str, mode: str) -> None:
            operation = f"{method.upper()} {path}"
            # Not `case.call`, which cuts long streams short and asks again when a connection was lost.
            request = case.as_transport_kwargs(f"{address}/v1")
            url = request["url"].removeprefix(address)
            digest.update(repr((method, url, request.get("json"), request.get("data"))).encode())
            try:
                response = session.request(**request, timeout=TIMEOUT_S)
            except requests.RequestException as error:
                statuses[operation, mode, 0] += 1
                failures.setdefault(f"{operation}: no answer: {error!r:.200}", f"{request!r:.2000}")
                return
            statuses[operation, mode, response.status_code] += 1
            content_type = response.headers.get("content-type", "")
            for problem in answers.problems(
                path, method, case.body, response.status_code, content_type, response.content
            ):
                failures.setdefault(f"{operation}: {problem}", f"{request!r:.2000}")

        for_each_case(spec, options.cases, options.seed, test)

    for (operation, mode, status), count in sorted(statuses.items()):
        print(f"{count:6} {operation:24} {mode:9} {status}")
    for problem, body in failures.items():
        print(f"\n{problem}\n  sent: {body}")
    cases, seconds = statuses.total(), time.monotonic() - started
    print(f"\n{cases} cases, {len(failures)} kinds of failure, {seconds:.0f} s, cases {digest.hexdigest()[:12]}")
    return 1 if failures or cases < options.cases or not _answered(statuses) else 0


def _answered(statuses: Counter[tuple[str, str, int]]) -> bool:
    """Every operation has had requests that it answered: else nothing was compared with the specification."""
    return {operation for operation, _, _ in statuses} == {name for name, _, status in statuses if status == 200}


if __name__ == "__main__":
    sys.exit(main())
