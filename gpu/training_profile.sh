cat > /tmp/p.py <<'E'
import sys, time, torch
from collections import Counter
from torch.profiler import ProfilerActivity as A, profile
from cosformer import tasks
from cosformer.bench import training as t
dev = sys.argv[1]
def steps(length):
    torch.compiler.reset()
    o = t.Options(mechanisms=("cosformer",), device=dev)
    task = tasks.create("lm", text="python", length=length, device=dev)
    s = t.Steps(t._run_config(o, o.given("tokens") // length), o.model("cosformer", length), task)
    for _ in range(5): s()
    return s
def sync():
    if dev == "cuda": torch.cuda.synchronize()
def timed(s, n=10):
    sync(); a = time.perf_counter()
    for _ in range(n): s()
    sync(); return 1e3 * (time.perf_counter() - a) / n
found = {}
for length in map(int, sys.argv[2:]):
    s = steps(length)
    ms = [timed(s) for _ in range(3)]
    with profile(activities=[A.CUDA] if dev == "cuda" else [A.CPU]) as p:
        for _ in range(3): s()
        sync()
    c = Counter()
    for e in p.key_averages():
        c[e.key[:90]] += (e.self_device_time_total if dev == "cuda" else e.self_cpu_time_total) / 3e3
    found[length] = c
    print(length, "ms a step", [round(x, 2) for x in ms], "kernels", round(sum(c.values()), 2), flush=True)
    s.close(); del s
first, *rest = found
for length in rest:
    d = {k: found[length][k] - found[first][k] for k in found[length] | found[first]}
    for k in sorted(d, key=lambda k: -abs(d[k]))[:25]:
        print(length, f"{d[k]:+8.3f} ms  {found[first][k]:8.3f} -> {found[length][k]:8.3f}  {k}")
E
python3 /tmp/p.py cuda 2048 16384 2048 65536
