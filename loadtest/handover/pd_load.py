"""Prefill and decode on a GPU each beside replicas on the same GPUs: the same loads, one layout after the other.

Usage: pd_load.py SHAPE_DIR --load ARGUMENTS... [--pods N] [--layouts pd,replicas] [--out DIR]. A load is arguments of
`baton bench serve`, such as "--rates 20,35 --input-tokens 1024 --seconds 16"; what it measures goes to
DIR/LAYOUT-NUMBER.json, which goodput_grid.py reads. pd: as many prefill as decode pods, which prefill by themselves
where that is predicted to cost less. replicas: decode pods only. Random weights, prefix caches off. On a machine
without GPUs all pods share the CPU.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import torch

from baton_cli.ports import free_loopback_ports
from loadtest.common.random_model import write_random_model
from loadtest.common.servers import HOST, as_flags, setting
from loadtest.handover.pods import Pods, gpus_from

_LAYOUTS = ("pd", "replicas")
# The kind of pod that computed the prompts.
_TOLD = "baton_gateway_prefills_total"


def measure(layout: str, model: Path, loads: list[str], arguments: argparse.Namespace) -> None:
    """Start a layout and run each load on it. Raises RuntimeError when one fails."""
    [admin] = free_loopback_ports(1)
    worker = ["--no-enable-prefix-caching", *as_flags(dict(arguments.settings))]
    decode = as_flags(dict(arguments.decode_settings)) if layout == "pd" else []
    gateway = ["--admin-port", str(admin)]
    with Pods(model, arguments.out / f"{layout}-logs") as pods:
        prefills = arguments.pods // 2 if layout == "pd" else 0
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for number in range(arguments.pods):
            role = "prefill" if number < prefills else "decode"
            flags = worker + decode if role == "decode" else worker
            addresses[role].append(f"{HOST}:{pods.start(role, flags, gpus_from(number), f'pod-{number}')}")
        for role, known in addresses.items():
            gateway += [f"--{role}-addresses", ",".join(known)] if known else []
        port = pods.start("gateway", gateway)
        decodes = range(prefills, arguments.pods)
        pods.wait_until_ready([f"pod-{n}" for n in decodes] if torch.cuda.device_count() > 1 else [], prefills)
        for number, load in enumerate(loads):
            command = [sys.executable, "-m", "baton_cli", "bench", "serve", *shlex.split(load)]
            command += ["--seed", str(arguments.seed), "--json-file", str(arguments.out / f"{layout}-{number}.json")]
            command += ["--target", f"{layout}=http://{HOST}:{port}", "--admin-url", f"{layout}=http://{HOST}:{admin}"]
            if subprocess.run(command).returncode:
                raise RuntimeError(f"{layout}: {load!r} failed")
        metrics = urllib.request.urlopen(f"http://{HOST}:{admin}/metrics", timeout=5).read().decode()
        print("\n".join(line for line in metrics.splitlines() if line.startswith(_TOLD)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, metavar="SHAPE_DIR")
    parser.add_argument("--load", dest="loads", action="append", required=True, metavar="ARGUMENTS")
    parser.add_argument("--layouts", default="pd,replicas", help="layouts to measure, in this order")
    parser.add_argument("--pods", type=int, default=2, help="workers of each layout, a GPU each")
    parser.add_argument("--out", type=Path, default=Path("loadtest/out/pd_load"))
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals, lengths and weights")
    parser.add_argument("--weights-dir", type=Path, help="folder that keeps random weights for the next run")
    parser.add_argument(
        "--set", dest="settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag that all workers get",
    )  # fmt: skip
    parser.add_argument(
        "--set-decode", dest="decode_settings", action="append", type=setting, default=[], metavar="KEY=VALUE",
        help="a flag that the decode pods of pd get, too",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.pods < 2 or arguments.pods % 2:
        parser.error("--pods must be even, as half of them prefill")
    unknown = set(arguments.layouts.split(",")) - set(_LAYOUTS)
    if unknown:
        parser.error(f"--layouts: {', '.join(sorted(unknown))}: not one of {', '.join(_LAYOUTS)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="baton-pd-") as name:
        model = arguments.weights_dir or Path(name)
        write_random_model(model, (arguments.shape / "config.json").read_text(), arguments.seed)
        for layout in arguments.layouts.split(","):
            measure(layout, model, arguments.loads, arguments)


if __name__ == "__main__":
    main()
