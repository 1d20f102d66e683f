"""Finds the gateways of a release and fetches their reports."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import urllib3
from kubernetes import client

from baton_controller.report import Report, parse_report
from baton_kube.object_watch import Objects, ObjectWatch

log = logging.getLogger(__name__)

_PORT_NAME = "admin"
_DEFAULT_PORT = 9400
_TIMEOUT_S = 3.0
_THREADS = 16


class Gateways:
    """Follows the EndpointSlices of a release's gateways, and fetches reports from their admin ports."""

    def __init__(self, api: client.ApiClient, namespace: str, release: str) -> None:
        self._watch = ObjectWatch(
            "gateways",
            client.DiscoveryV1Api(api).list_namespaced_endpoint_slice,
            self._changed,
            namespace=namespace,
            label_selector=f"app.kubernetes.io/instance={release},app.kubernetes.io/component=gateway",
        )
        self._urls: dict[str, str] = {}
        self._listed = asyncio.Event()
        self._http = urllib3.PoolManager(num_pools=256, maxsize=2, retries=False, timeout=_TIMEOUT_S)
        self._threads = ThreadPoolExecutor(_THREADS, "fetch a report")
        self._silent: set[str] = set()

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def wait_until_listed(self) -> None:
        """Return when the API server has listed the gateways for the first time."""
        await self._listed.wait()

    async def fetch_reports(self) -> dict[str, Report]:
        """Return the reports of the gateways that answer, by pod name."""
        loop = asyncio.get_running_loop()
        urls = dict(self._urls)
        fetches = (loop.run_in_executor(self._threads, self._fetch, url) for url in urls.values())
        answers = await asyncio.gather(*fetches)
        reports = {}
        for name, answer in zip(urls, answers, strict=True):
            if isinstance(answer, Report):
                reports[name] = answer
                self._silent.discard(name)
            elif name not in self._silent:
                self._silent.add(name)
                log.warning("gateway %s does not answer: %s", name, answer, extra={"event": "gateway_silent"})
        self._silent &= urls.keys()
        return reports

    def _fetch(self, url: str) -> Report | Exception:
        try:
            return parse_report(self._get(f"{url}/metrics").decode(), self._get(f"{url}/pods"))
        except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError) as error:
            return error

    def _get(self, url: str) -> bytes:
        answer = self._http.request("GET", url)
        if answer.status != 200:
            raise ValueError(f"{url} answers with status {answer.status}")
        return answer.data

    def _changed(self, slices: Objects) -> None:
        self._urls = _admin_urls(slices)
        self._listed.set()


def _admin_urls(slices: Objects) -> dict[str, str]:
    """Return the URLs of the gateways' admin ports, by pod. Several Services or IP versions may list the same pod."""
    urls: dict[str, str] = {}
    for piece in slices.values():
        ports = [port.port for port in piece.ports or () if port.name == _PORT_NAME]
        for endpoint in piece.endpoints or ():
            address = endpoint.addresses[0]
            name = endpoint.target_ref.name if endpoint.target_ref else address
            host = f"[{address}]" if ":" in address else address
            if ports or name not in urls:
                urls[name] = f"http://{host}:{ports[0] if ports else _DEFAULT_PORT}"
    return urls
