"""The processes of a local Baton and their command lines."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton_cli.ports import LOOPBACK, Address
from baton_cli.spec import ChildSpec

_DRAIN_S = 6  # time for running answers to finish when the user stops Baton
_GATEWAY_GRACE_S = _DRAIN_S + 2.0


@dataclass(frozen=True)
class Layout:
    """The processes to run. worker_flags, gateway_flags: passed on as is. prefill: with 0, decode workers prefill."""

    model: str
    served_model_name: str
    public: Address
    admin: Address
    prefill: int = 1
    decode: int = 1
    worker_flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()
    api_keys: Sequence[str] = field(default=(), repr=False)

    @property
    def workers(self) -> int:
        return self.prefill + self.decode

    def in_shutdown_order(self, worker_ports: Sequence[int], metrics_ports: Sequence[int]) -> list[list[ChildSpec]]:
        """Return the children in groups that end one after the other. worker_ports, metrics_ports: loopback ports, one
        for each worker."""
        addresses = [Address(LOOPBACK, port) for port in worker_ports]
        prefill, decode = addresses[: self.prefill], addresses[self.prefill :]
        workers = self._workers("decode", decode, metrics_ports[self.prefill :])
        workers += self._workers("prefill", prefill, metrics_ports[: self.prefill])
        return [[self._gateway(decode, prefill)], workers]

    def _gateway(self, decode: Sequence[Address], prefill: Sequence[Address]) -> ChildSpec:
        flags = [*self.gateway_flags, "--shutdown-grace-s", str(_DRAIN_S)]
        flags += ["--admin-host", self.admin.host, "--admin-port", str(self.admin.port)]
        flags += ["--decode-addresses", ",".join(map(str, decode))]
        if prefill:
            flags += ["--prefill-addresses", ",".join(map(str, prefill))]
        return ChildSpec(
            name="gateway",
            argv=self._command("gateway", self.public, flags),
            # Not a flag, because every user of the machine can read command lines.
            env={"BATON_API_KEYS": ",".join(self.api_keys)} if self.api_keys else {},
            ready_at=self.public,
            grace_s=_GATEWAY_GRACE_S,
        )

    def _workers(self, role: str, addresses: Sequence[Address], metrics_ports: Sequence[int]) -> list[ChildSpec]:
        return [
            ChildSpec(
                name=role if len(addresses) == 1 else f"{role}-{index}",
                argv=self._command(role, address, ["--metrics-port", str(metrics_port), *self.worker_flags]),
            )
            for index, (address, metrics_port) in enumerate(zip(addresses, metrics_ports, strict=True))
        ]

    def _command(self, service: str, address: Address, flags: Sequence[str]) -> tuple[str, ...]:
        common = ("--model", self.model, "--served-model-name", self.served_model_name)
        listen = ("--host", address.host, "--port", str(address.port))
        return (sys.executable, "-m", "baton_cli", service, *common, *listen, *flags)


def greeting(layout: Layout, metrics_ports: Sequence[int]) -> str:
    """Return the text that tells the user how to send a request, where metrics are, and how to stop Baton."""
    url = f"http://{layout.public.reachable}"
    body = json.dumps(
        {"model": layout.served_model_name, "messages": [{"role": "user", "content": "What is Baton?"}]}
    ).replace("'", "'\\''")
    lines = [f"curl {url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
    if layout.api_keys:
        lines.append('-H "Authorization: Bearer $BATON_API_KEY"')
    curl = " \\\n    ".join([*lines, f"-d '{body}'"])
    addresses = [layout.admin, *(Address(LOOPBACK, port) for port in metrics_ports)]
    metrics = " ".join(f"http://{address}/metrics" for address in addresses)
    return f"\nBaton is ready at {url}. Ask it something:\n\n  {curl}\n\nMetrics: {metrics}\nCtrl-C stops it.\n"
