"""Time and peak memory of calls, measured side by side."""

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch

from cosformer.check import check_threads
from cosformer.ops.chunked import forget

Call = Callable[[], object]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SHORTEST_SAMPLE = 0.1
"""Seconds. A shorter call is repeated within a sample: a moment in which a neighbour takes the
machine should not be all that is measured."""
NO_MEMORY = "out of memory"
"""How the reason of a failure begins where memory was too small."""
WARM_UP = 3
"""Calls before a recording or a measurement of the host."""


def median_times(calls: Mapping[K, Call], *, repeats: int, device: str = "cpu") -> dict[K, float]:
    """Median milliseconds of one call of each candidate.

    Candidates take turns within every repeat, so a change in load meets all of them alike.
    """
    counts = {name: _calls_per_sample(call, device) for name, call in calls.items()}
    samples: dict[K, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        first = repeat % len(names)  # nobody always runs after the same neighbour
        for name in names[first:] + names[:first]:
            seconds = _sample(calls[name], counts[name], device)
            samples[name].append(1e3 * seconds / counts[name])
    return {name: statistics.median(values) for name, values in samples.items()}


def peak_extra_bytes(call: Call, device: str = "cpu") -> int:
    """The most bytes that torch held during the call beyond what it held before."""
    forget()  # memory kept from earlier calls counts as well
    if torch.device(device).type == "cuda":
        synchronise(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronise(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Every allocation and release of torch's allocator, also those inside an operator. Resident
    # memory of a process would add what libc keeps for itself after a release.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler greets on stderr otherwise
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        call()
    assert profile.kineto_results is not None
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def host_time(call: Call, *, device: str, count: int = 50) -> float:
    """Median milliseconds until a call returns, its work perhaps still under way on the device."""
    samples = []
    for _ in range(WARM_UP + count):
        synchronise(device)  # a full queue would make the host wait
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    synchronise(device)
    return 1e3 * statistics.median(samples[WARM_UP:])


def recorded(call: Call) -> Call:
    """The call as a CUDA graph, which costs the host next to nothing to replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is compiled or tuned once must not be in the graph
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def attempt(make: Callable[[], T], device: str) -> tuple[T | None, str]:
    """What `make` returns and "", or None and why it failed: no peer shall stop a run."""
    try:
        made = make()
        synchronise(device)
        return made, ""
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        kind = NO_MEMORY if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
        reason = f"{kind}: {first_line[:200]}"
    gc.collect()  # the tensors of the frames that failed
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return None, reason


def foreseen(seconds: float, size: float, *, most: float, room: float, device: str) -> str:
    """Why a call of about so many seconds and bytes is not made; empty if it may be.

    `most`: the longest call in seconds. `room`: the most memory in GiB on a CPU, where a process
    that takes too much is killed; on a GPU it is tried.
    """
    if seconds > most:
        return f"skipped: a call would take about {seconds:.0f} s"
    if size / 2**30 > room and device == "cpu":
        return f"{NO_MEMORY}: it would need about {size / 2**30:.0f} GiB"
    return ""


def seconds_of(call: Call, device: str) -> float:
    """Seconds until one call has been made and the device has done its work."""
    begin = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - begin


def synchronise(device: str) -> None:
    """Wait until the device has done all that it was asked."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def busy(count: int = 1) -> str | None:
    """A warning if other processes keep the cores of this machine busy; None if not.

    `count` is the number of CPU threads that `--threads` has set, where a verb has that option.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load < 0.5:
        return None
    fewer = " (--threads 1 is faster on a busy machine)" if count > 1 else ""
    return f"the machine is busy (load {load:.1f} before the start): all takes longer{fewer}"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's CPU threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(check_threads(count))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calls_per_sample(call: Call, device: str) -> int:
    seconds = _sample(call, 1, device)
    if seconds < 1:  # the first calls pay for start-up; a long one hides it
        seconds = min(_sample(call, 1, device) for _ in range(WARM_UP))
    return max(1, math.ceil(SHORTEST_SAMPLE / seconds))


def _sample(call: Call, count: int, device: str) -> float:
    """Seconds of `count` calls."""
    if torch.device(device).type == "cuda":
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - begin
