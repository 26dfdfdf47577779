"""Interleaved timing: contenders take turns, so that what disturbs the machine hits all alike."""

import statistics
import time


def time_calls(run, repeats):
    """Seconds of each of `repeats` calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def interleave(contenders, *, rounds=5, seconds_each=0.8, calls_max=400):
    """Times all contenders: {name: (timer, estimate)} with timer(repeats) -> seconds of each call, estimate in seconds.

    Each turn begins with a pause, in which another library's spinning threads go to sleep, and an untimed call. A
    contender too slow for its share of time gets fewer turns, three at least (one beyond ten seconds a call).
    """
    samples = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, (timer, estimate) in contenders.items():
            turns = rounds if estimate * rounds * 2 <= seconds_each else 1 if estimate > 10 else 3
            if turn >= turns:
                continue
            calls = int(min(max(seconds_each / rounds / max(estimate, 1e-7), 1), calls_max))
            time.sleep(0.02)
            if estimate < 1:
                timer(1 if calls < 20 else 5)
            samples[name] += timer(calls)
    return {name: summary(seconds) for name, seconds in samples.items()}


def summary(seconds):
    return {
        "median_ms": 1e3 * statistics.median(seconds),
        "min_ms": 1e3 * min(seconds),
        "samples": len(seconds),
    }
