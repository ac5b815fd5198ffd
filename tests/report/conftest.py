"""A small run with known numbers."""

import pytest

from cosformer.records import Run

DATE = "2026-01-02T03:04:05+00:00"


@pytest.fixture
def rows():
    hardware = {"device": "cpu", "name": "Test processor", "cores": 2, "threads": 2}
    run = Run(hardware, {"torch": "2.13.0"}, "0123456789ab", 0, DATE)
    setting = {"batch": 1, "heads": 8, "width": 64, "causal": True, "dtype": "float32"}
    found = []
    for pass_name, factor in (("forward", 1), ("forward_backward", 3)):
        for length in (256, 1024, 4096):
            at = {**setting, "pass": pass_name, "length": length}
            found.append(run.row("time", factor * length / 256, "ms", candidate="chunked", **at))
            if length < 4096:
                softmax = factor * (length / 512) ** 2  # overtaken at 1024
                found.append(run.row("time", softmax, "ms", candidate="sdpa", **at))
                ratio = softmax / (factor * length / 256)
                found.append(run.row("time_ratio", ratio, "x", candidate="sdpa", **at))
            found.append(run.row("peak_memory", 1.5, "x (q+k+v)", candidate="chunked", **at))
    between = {"pass": "forward", "from": 256, "to": 4096}
    found.append(run.row("growth_exponent", 1.0, "", candidate="chunked", **setting, **between))
    for position in (10, 1_000_000):
        found.append(run.row("step_time", 0.05, "ms", position=position, **setting))
        found.append(run.row("step_memory", 2048, "bytes", position=position, **setting))
    return [*found, run.row("step_memory_growth", 0, "bytes", **setting, **between)]


@pytest.fixture
def gpu_rows():
    """Three cells, two of them alike but for batch and length; one peer is causal only."""
    hardware = {"device": "cuda", "name": "Test GPU", "memory_gib": 80}
    run = Run(hardware, {"torch": "2.11.0"}, None, 0, DATE)
    found = [run.row("copy_bandwidth", 4e12, "bytes/s", candidate="copy")]
    found += [run.row("failed", 1, "", candidate="fla_fused", reason="fla is not installed")]
    for batch, heads, length, width in ((8, 16, 1024, 64), (1, 16, 65536, 64), (2, 8, 4096, 128)):
        for causal in (True, False):
            for pass_name, factor in (("forward", 1), ("forward_backward", 3)):
                at = {"batch": batch, "heads": heads, "length": length, "width": width}
                at |= {"causal": causal, "dtype": "bfloat16", "repeats": 9, "pass": pass_name}
                ours = factor * batch * length / 2**16
                found.append(run.row("time", ours, "ms", candidate="auto", **at))
                found.append(run.row("floor_ratio", 2.5, "x", candidate="auto", **at))
                found.append(run.row("time", 10 * ours, "ms", candidate="chunked", **at))
                if causal and length < 65536:
                    found.append(run.row("time", 4 * ours, "ms", candidate="fla_cos", **at))
    return found
