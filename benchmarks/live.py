"""What the live page costs: steps beside `gradvac report RUN --live` against steps without it.

    python benchmarks/live.py --seconds 120

A training records into a folder; a server of the page runs beside it, and something asks it as a
browser does, every two seconds. Blocks of steps beside the server and blocks in which it is
stopped (SIGSTOP) alternate, and every second round begins with the other. `time` is the median over
rounds of the ratio of the two; `server` is the processor time that the server took after its first
page, as a share of the whole time, of one processor and of all (it works for its budget of the
whole time in half of it, so that `time` says up to twice too much); `first page` are the seconds of
processor time until then, imports included, once per server. Training never waits for the server:
it only reads files, and holds no lock.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import torch
from transformer import SIZES, Transformer, component, make_batch, row_losses

import gradvac
from gradvac.analysis import Recorder


def cpu_seconds(process: int) -> float:
    """Processor time of a process so far, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Browser(threading.Thread):
    """Asks for the version every two seconds, and for the page when it has changed."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, self.pages, self.is_over = address, 0, threading.Event()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._address + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def run(self) -> None:
        seen = b""
        while not self.is_over.wait(2.0):
            version = self.get("version")
            if version != seen:
                self.get("")
                seen, self.pages = version, self.pages + 1


def start_server(run: Path) -> tuple[subprocess.Popen[str], str]:
    """The server, and where its page is."""
    command = [sys.executable, "-m", "gradvac", "report", str(run), "--live"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"http://\S+", server.stdout.readline())
    assert found is not None, "the server has not started"
    return server, found[0]


def measure(seconds: float, num_tasks: int, block: int) -> dict[str, float]:
    """The table's numbers."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = Transformer(SIZES["tiny"])
    source, target, tasks = make_batch(SIZES["tiny"], num_tasks, "cpu")
    names = [f"task{t}" for t in range(num_tasks)]
    aligner = gradvac.Aligner(model, names, gradvac.GradVac(), component)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step = 0

    def steps(recorder: Recorder) -> float:
        nonlocal step
        start = time.perf_counter()
        for _ in range(block):
            optimizer.zero_grad(set_to_none=True)
            alignment = aligner.backward(row_losses(model, source, target), tasks)
            optimizer.step()
            step += 1
            recorder(step, alignment)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        with Recorder(run / "record.bin", every=1, chunk=8) as recorder:
            steps(recorder)
            server, address = start_server(run)
            browser = Browser(address)
            browser.get("")
            first = cpu_seconds(server.pid)
            browser.start()
            ratios, alone, begin = [], [], time.perf_counter()
            while time.perf_counter() - begin < seconds:
                spent = {}
                for is_live in (True, False)[:: 1 if len(ratios) % 2 else -1]:
                    server.send_signal(signal.SIGCONT if is_live else signal.SIGSTOP)
                    spent[is_live] = steps(recorder)
                ratios.append(spent[True] / spent[False])
                alone.append(spent[False] / block)
            total = time.perf_counter() - begin
            server.send_signal(signal.SIGCONT)
            share = (cpu_seconds(server.pid) - first) / total
            browser.is_over.set()
            browser.join()
            server.terminate()
            server.wait()
    return {
        "step, ms": 1000 * statistics.median(alone),
        "time": statistics.median(ratios),
        "server, of one processor": share,
        "server, of all": share / (os.cpu_count() or 1),
        "pages": browser.pages,
        "first page, s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--block", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args.seconds, args.tasks, args.block)
    for name, value in found.items():
        print(f"{name:26} {value:.4g}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
