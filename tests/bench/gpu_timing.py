"""How PyTorch calls are timed on a GPU."""

import statistics

import torch


def milliseconds(solve, repeats):
    """The median of single calls."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        solve()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
