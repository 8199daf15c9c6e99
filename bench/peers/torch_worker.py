#!/usr/bin/python3
"""PyTorch's side of bench/peers: computes the SwiGLU layer when it is told to.

Reads lines, answers each with one line:

    prepare DTYPE DIM HIDDEN_DIM ROWS SAMPLE_SECONDS    random weights and input; "ready"
    sample                                              runs as many calls as fill a sample; the mean seconds of a call
    error                                               max|y − ref| / rms(ref) against float64
    version                                             what runs here

    bench/peers/torch_worker.py THREADS
"""

import os
import sys
import time

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"missing: {error}", flush=True)
    sys.exit(1)


def pin(threads):
    """The main thread on the first CPU, the others on those after it."""
    cpus = sorted(os.sched_getaffinity(0))
    others = [int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    if threads > 1 and len(cpus) > 1:
        os.sched_setaffinity(os.getpid(), {cpus[0]})
        for index, task in enumerate(others):
            os.sched_setaffinity(task, {cpus[1 + index % (len(cpus) - 1)]})
    return set(cpus)


class Layer:
    def __init__(self, dtype, dim, hidden_dim, rows):
        generator = torch.Generator().manual_seed(3)
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]

        def normal(out, size):
            return (torch.randn(out, size, generator=generator) / size ** 0.5).to(kind)

        self.gate, self.up, self.down = normal(hidden_dim, dim), normal(hidden_dim, dim), normal(dim, hidden_dim)
        self.x = torch.randn(rows, dim, generator=generator).to(kind)
        self.y = None

    def run(self):
        hidden = F.silu(F.linear(self.x, self.gate)) * F.linear(self.x, self.up)
        self.y = F.linear(hidden, self.down)

    def error(self):
        rows = sorted({0, len(self.x) // 2, len(self.x) - 1})
        x = self.x[rows].double().numpy()

        def product(a, weights):  # by blocks of outputs, so that no whole matrix is held in float64
            blocks = [a @ weights[n:n + 512].double().numpy().T for n in range(0, len(weights), 512)]
            return np.concatenate(blocks, axis=1)

        gate = product(x, self.gate)
        want = product(gate / (1 + np.exp(-gate)) * product(x, self.up), self.down)
        return np.abs(self.y[rows].double().numpy() - want).max() / np.sqrt((want * want).mean())


def main():
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    layer, calls, cpus = None, 1, os.sched_getaffinity(0)
    with torch.no_grad():
        for line in sys.stdin:
            command, *words = line.split()
            if command == "version":
                print(f"PyTorch {torch.__version__}", flush=True)
            elif command == "prepare":
                os.sched_setaffinity(0, cpus)
                layer = None
                layer, target, calls = Layer(words[0], *map(int, words[1:4])), float(words[4]), 1
                layer.run()
                cpus = pin(threads)
                while True:
                    seconds = sample(layer, calls)
                    if seconds * calls >= target / 2:
                        break
                    calls *= 2
                print("ready", flush=True)
            elif command == "sample":
                print(sample(layer, calls), flush=True)
            elif command == "error":
                print(layer.error(), flush=True)


def sample(layer, calls):
    if calls > 1:
        layer.run()
    begin = time.perf_counter()
    for _ in range(calls):
        layer.run()
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    main()
