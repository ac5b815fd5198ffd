"""Check and time the kernels of carry/kernels beside those of the tree in the current folder.

    python carry/kernels_check.py [seconds]        from the root of the repository; all stages, 90 s

Stages, each a process of its own: direct, correct, refuse, time (after, before), first, pytest.
`python carry/kernels_check.py STAGE` runs one of them in the tree that PYTHONPATH names.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time

ROOT = os.getcwd()
NEW = os.path.join(ROOT, "carry", "kernels")
HERE = os.path.abspath(__file__)
FAILED = os.path.join(tempfile.gettempdir(), "kernels_failed.json")


def say(*words):
    print(*words, flush=True)


# ---- the stages together ----

def orchestrate(limit):
    begin = time.time()
    caches = tempfile.mkdtemp()
    base = dict(os.environ, XDG_CACHE_HOME=os.path.join(caches, "x"), TRITON_CACHE_DIR=os.path.join(caches, "t"),
                PYTHONUNBUFFERED="1")

    def stage(name, tree, most, command=None, **env):
        left = limit - (time.time() - begin)
        if left < 4:
            return say(f"== {name}: no time left")
        started = time.time()
        say(f"== {name}")
        try:
            code = subprocess.run(command or [sys.executable, HERE, *name.split()], env={**base, "PYTHONPATH": tree, **env},
                                  timeout=min(most, left), cwd=tree if command else ROOT).returncode
        except subprocess.TimeoutExpired:
            code = "time is up"
        say(f"== {name}: rc {code}, {time.time() - started:.1f} s")

    if os.path.exists(FAILED):
        os.remove(FAILED)
    stage("direct", NEW, 25)
    stage("correct", NEW, 45)
    if os.path.exists(FAILED):
        stage("correct before", ROOT, 20)  # how the old kernels do in the cases that failed
    stage("time after", NEW, 25)
    stage("time before", ROOT, 30)
    stage("refuse", NEW, 15)
    stage("first", NEW, 25)
    left = max(5, int(limit - (time.time() - begin)))
    which = "gate or pack or tape or mild or fading or retention"
    stage("pytest", NEW, left, [sys.executable, "-m", "pytest", "-v", "--maxfail=8", "--tb=short", "--no-header", "-p", "no:cacheprovider",
                                "tests/ops/test_op_hopper_gpu.py", "-m", "gpu", "-k", which])
    say(f"== all: {time.time() - begin:.1f} s")


# ---- kernels by themselves ----

def direct():
    import torch
    from cosformer.ops.hopper.nvrtc import Launch
    from cosformer.ops.hopper.packing import place_packed
    from cosformer.ops.hopper.plan import kernel
    from cosformer.ops.hopper.roles import Gates
    import struct

    torch.manual_seed(0)
    bad = count = 0

    def attempt(name, work):
        nonlocal bad, count
        count += 1
        try:
            fault = work()
        except Exception as error:  # noqa: BLE001
            fault = f"{type(error).__name__}: {str(error)[:300]}"
        if fault:
            bad += 1
            say("FAIL direct", name, fault)

    kinds = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

    def draw(b, h, t, dtype):
        gates = -0.7 * torch.rand(b, t, h, device="cuda").to(dtype).transpose(1, 2)
        gates[..., 7::50], gates[..., 8::500] = -110, -torch.inf
        return gates

    def l_of(gates, spans, packed):
        clamped = gates.double().clamp(min=-110)
        out = torch.zeros_like(clamped)
        for a, e in spans:
            part = clamped[..., a:e].clone()
            if packed and e > a:
                part[..., 0] = 0
            n = part.shape[-1]
            padded = torch.nn.functional.pad(part, (0, -n % 64)).unflatten(-1, (-1, 64)).cumsum(-1).flatten(-2)[..., :n]
            out[..., a:e] = padded / math.log(2)
        return out

    def sums(b, h, t, dtype, packed, of_l=False):
        gates = draw(b, h, t, dtype)
        bounds = torch.tensor([0, t // 3, t // 3, t - t // 4, t], dtype=torch.int32, device="cuda") if packed else None
        spans = list(zip(bounds[:-1].tolist(), bounds[1:].tolist())) if packed else [(0, t)]
        given = gates.double().clamp(min=-110).cumsum(-1) if of_l else gates
        options = Gates(GATE=4, SUMMED=False) if of_l else Gates(GATE=kinds[dtype])
        out = torch.full((b, h, t), torch.nan, device="cuda")
        blocks = len(spans) if packed else -(-t // 512)
        tail = struct.pack("3q3i", *given.stride(), h, t, blocks)
        Launch(kernel("sum_gates", options, 0), (b * h * blocks, 1), 256, 0, 3, tail,
               (*range(0, 48, 8), *range(48, 60, 4)))(given, out, bounds)
        right = l_of(gates, spans, packed)
        error = ((out - right).abs() / (1 + right.abs())).max().item()
        return None if error < 2e-6 else f"error {error:.1e}, nan {int(out.isnan().sum())}"

    def grads(b, h, t, dtype, cluster, summed, both, ends):
        qn, kn = 1 + both, 2 - both
        q, k = (torch.randn(b, h, t, n, device="cuda") for n in (qn, kn))
        lq, lk = (torch.randn_like(x) if both else None for x in (q, k))
        gates = draw(b, h, t, dtype)
        a, e = (torch.randn(b, h, device="cuda") if ends else None for _ in range(2))
        out = gates.new_full((b, h, t), torch.nan) if summed else gates.new_full((b, h, t), torch.nan, dtype=torch.float64)
        tail = struct.pack("3q4i", *gates.stride(), h, t, qn, kn)
        it = kernel("decay_gradient", Gates(kinds[dtype], summed, cluster), 0)
        Launch(it, (b * h * cluster, 1), 512, 0, 8, tail, (*range(0, 88, 8), *range(88, 104, 4)))(q, k, lq, lk, gates, a, e, out)
        bq, bk = ((x.double() - (0 if y is None else y.double())).sum(-1) for x, y in ((q, lq), (k, lk)))
        grad, size = bq - bk, bq.square() + bk.square()
        end, start = (0 if x is None else x.double()[..., None] for x in (e, a))
        if ends:
            grad[..., -1:] += end
        right = grad - (grad.sum(-1, keepdim=True) - start) / size.sum(-1, keepdim=True) * size
        if summed:
            right = right.flip(-1).cumsum(-1).flip(-1).masked_fill(gates < -110, 0)
        error = ((out.double() - right).abs() / (right.abs().mean() + right.abs())).max().item()
        room = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float64: 1e-5}[dtype] if summed else 1e-5
        return None if error < room else f"error {error:.1e}, nan {int(out.isnan().sum())}"

    for dtype in kinds:
        for t in (1, 64, 65, 513, 4097):
            for packed in (False, True):
                attempt(f"sum_gates {dtype} {t} packed={packed}", lambda: sums(1 if packed else 2, 3, t, dtype, packed))
    for t in (1, 100, 3000, 70_000):
        attempt(f"sum_gates of L {t}", lambda: sums(1, 2, t, torch.float32, False, True))
        attempt(f"sum_gates of L {t} packed", lambda: sums(1, 2, t, torch.float32, True, True))
    for dtype, cluster, summed in ((torch.float32, 1, True), (torch.float32, 8, True), (torch.bfloat16, 1, True),
                                   (torch.float16, 8, True), (torch.float64, 8, False), (torch.float64, 1, False)):
        for t in (1, 100, 2048, 2049, 5000, 65_536, 300_001):
            for both, ends in ((False, False), (True, True)):
                attempt(f"decay_gradient {dtype} cluster={cluster} summed={summed} {t} {both}",
                        lambda: grads(1, 2, t, dtype, cluster, summed, both, ends))

    def place(lengths, dtype, theta):
        ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", dtype)
        t = int(ends[-1])
        found = place_packed(ends, t, theta, 2)
        index = torch.arange(t, device="cuda", dtype=dtype)
        sequence = torch.bucketize(index, ends[1:], right=True)
        position = (index - ends[sequence]).double()
        angle = (math.pi / 2) / ends.diff()[sequence].double()[None] if theta is None else theta
        psi = torch.stack([(angle * position).cos(), (angle * position).sin()], -1).float()[None]
        faults = [name for name, ok in (
            ("sequence", torch.equal(found.sequence.long(), sequence.long())),
            ("position", torch.equal(found.position[0], position)),
            ("bounds", torch.equal(found.bounds.long(), ends.long())),
            ("theta", torch.allclose(found.theta, angle.expand_as(found.theta), rtol=1e-14, atol=0)),
            ("basis", (found.basis - psi).abs().max().item() < 2e-7),
        ) if not ok]
        return ", ".join(faults)

    for dtype in (torch.int32, torch.int64):
        for lengths in ([1], [0, 3, 0, 700, 64, 1, 0], [1024] * 64, [37] * 300):
            for theta in (None, torch.full((1, 1), 1e-3, dtype=torch.float64, device="cuda"),
                          torch.tensor([[1e-3], [1e-2], [0.5]], dtype=torch.float64, device="cuda")):
                attempt(f"place_packed {dtype} {len(lengths)} {None if theta is None else theta.shape}",
                        lambda: place(lengths, dtype, theta))
    say(f"direct: {count - bad} of {count} right")
    return int(bad > 0)


# ---- the op against float64 ----

def cases():
    """name, and what a case is made of."""
    def case(name, **given):
        return name, given

    for causal in (True, False):
        way = "causal" if causal else "both ways"
        for t in (1, 2, 63, 64, 65, 127, 700, 1000):
            yield case(f"{way} {t} mild", t=t, causal=causal)
        for kind in ("medium", "strong", "resets", "one", "zero"):
            yield case(f"{way} 700 {kind}", t=700, causal=causal, kind=kind)
        yield case(f"{way} 4097 cut mild", t=4097, causal=causal, h=2)
        yield case(f"{way} 4097 cut resets", t=4097, causal=causal, h=2, kind="resets")
        yield case(f"{way} 16384 cut mild", t=16384, causal=causal, h=1)
        for dtype in ("bfloat16", "float16", "float64"):
            yield case(f"{way} 300 gates {dtype}", t=300, causal=causal, gates=dtype)
        yield case(f"{way} 500 strided", t=500, causal=causal, strided=True)
        yield case(f"{way} 700 grouped", t=700, causal=causal, h=4, hk=2)
        yield case(f"{way} 700 width 128", t=700, causal=causal, d=128, v=128)
        yield case(f"{way} 3000 width 128 cut", t=3000, causal=causal, d=128, v=128, h=2)
        yield case(f"{way} packed mild", causal=causal, lengths=[64, 1, 0, 700, 300, 128, 7])
        yield case(f"{way} packed resets", causal=causal, lengths=[64, 1, 0, 700, 300, 128, 7], kind="resets")
        yield case(f"{way} packed 300 sequences", causal=causal, lengths=[(37 * n) % 90 for n in range(300)])
        yield case(f"{way} packed 256 sequences", causal=causal, lengths=[(37 * n) % 90 for n in range(256)])
        yield case(f"{way} packed without gates", causal=causal, lengths=[64, 1, 0, 700, 300, 128, 7], kind=None)
        yield case(f"{way} packed long int64 bounds, horizon", causal=causal, lengths=[1000, 24, 500], kind=None,
                   horizon=1500.0, wide=True)
        yield case(f"{way} learned decay of heads", t=700, causal=causal, kind=None, learned=True)
        yield case(f"{way} even decay", t=3000, causal=causal, kind=None, even=0.97, h=2)
    yield case("causal 200 heads", t=130, causal=True, b=2, h=100)
    yield case("causal 70000 cut mild", t=70_000, causal=True, b=1, h=1, kind="slow")
    yield case("undivided and gamma", t=700, causal=True, undivided=True)
    yield case("stream with a state", t=700, causal=True, stream=True)


def made(given):
    """Inputs, and the call by an implementation."""
    import torch
    from cosformer import attention, linear_attention, linear_attention_with_state, State

    g = torch.Generator("cuda").manual_seed(len(json.dumps(given)))
    lengths = given.get("lengths")
    t = sum(lengths) if lengths else given["t"]
    b, h = (1 if lengths else given.get("b", 2)), given.get("h", 3)
    hk, d, dv = given.get("hk", h), given.get("d", 64), given.get("v", 64)

    def normal(heads, width):
        if given.get("strided"):
            x = torch.randn(b, t, heads, 2 * width, device="cuda", generator=g)
            return (x[..., width:] + 0.3).bfloat16().contiguous().transpose(1, 2) if width % 64 else (
                (x + 0.3).bfloat16()[..., width:].transpose(1, 2))
        return (torch.randn(b, heads, t, width, device="cuda", generator=g) + 0.3).bfloat16()

    inputs = [normal(h, d), normal(hk, d), normal(hk, dv)]
    kind = given.get("kind", "mild")
    if kind:
        u = torch.rand(b, t, h, device="cuda", generator=g).transpose(1, 2)
        gates = {"mild": -0.1 * u, "slow": -0.002 * u, "medium": -1.5 * u, "strong": -20 * u, "resets": -0.05 * u,
                 "one": -0.01 * u, "zero": 0 * u}[kind].clone(memory_format=torch.preserve_format)
        if kind == "resets":
            gates[..., 5::97], gates[..., 6::389], gates[..., 40:44] = -60.0, -torch.inf, -40.0
        if kind == "one":
            gates[:, 0, :64] = -3.0
        inputs.append(gates.to(getattr(torch, given.get("gates", "float32"))))
    if given.get("learned"):
        inputs.append(torch.tensor([0.5, 0.9, 0.99][:h], device="cuda"))
    if given.get("stream"):
        inputs.append(torch.randn(b, h, 1, d, dv, device="cuda", generator=g))
    if given.get("undivided"):
        inputs.append(torch.tensor([0.5, 0.9, 0.99][:h], device="cuda"))
    about = {"causal": given.get("causal", True)}
    if lengths:
        dtype = torch.int64 if given.get("wide") else torch.int32
        about["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to("cuda", dtype)
    horizon = given.get("horizon") or (None if lengths else 2.0 * t)

    def call(*x, impl):
        exact = impl != "hopper"
        q, k, v, *rest = (y.double() for y in x) if exact else x
        if given.get("stream"):
            gates, first = rest
            state = State(first, first[..., 0][..., :0], torch.tensor(0).cuda(), None,
                          log_decay=torch.zeros(b, h, dtype=torch.float64, device="cuda"))
            out, after = linear_attention_with_state(q, k, v, state=state, log_decay=gates, normaliser="none", scale=0.3, impl=impl)
            return torch.cat([out.double(), after.key_value[:, :, 0].double()], 2)
        if given.get("undivided"):
            gates, gamma = rest
            return linear_attention(q, k, v, causal=True, normaliser="none", log_decay=gates, gamma=gamma, impl=impl)
        more = {"decay": rest[-1]} if given.get("learned") else {"log_decay": rest[0]} if kind else {}
        if given.get("even"):
            more = {"decay": given["even"]}
        return attention(q, k, v, horizon=horizon, **about, **more, impl=impl)

    return inputs, call


def results(call, inputs, impl, cotangent=None):
    import torch
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves, impl=impl)
    if cotangent is None:
        cotangent = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).bfloat16()
    found = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
    torch.cuda.synchronize()
    return [out.detach(), *found], cotangent


def correct(before):
    import torch
    import cosformer
    say("tree:", cosformer.__file__, torch.__version__)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody writes to holds NaN
    import warnings
    warnings.simplefilter("ignore")
    wanted = json.load(open(FAILED)) if before else None
    failed, count, worst = [], 0, {}
    for name, given in cases():
        if wanted is not None and name not in wanted:
            continue
        count += 1
        try:
            inputs, call = made(given)
            exact, cotangent = results(call, inputs, "chunked")
            runs = [results(call, inputs, "hopper", cotangent)[0] for _ in range(1 if before else 3)]
        except Exception as error:  # noqa: BLE001
            failed.append(name)
            say("FAIL", name, f"{type(error).__name__}: {str(error)[:400]}")
            if "CUDA" in str(error) and ("assert" in str(error) or "illegal" in str(error) or "launch" in str(error)):
                say("the device is lost; the rest of this stage is left out")
                break
            continue
        faults, names = [], ["out", "dq", "dk", "dv", "dgates", "dstate"]
        for n, right in enumerate(exact):
            mine = runs[0][n].double()
            label = names[n]
            if not all(torch.equal(runs[0][n], other[n]) for other in runs):
                faults.append(f"{label} differs between runs")
            if not mine.isfinite().all():
                faults.append(f"{label}: {int((~mine.isfinite()).sum())} not finite")
                continue
            scale = right.double().norm().item()
            error = (mine - right.double()).norm().item() / max(scale, 1e-30)
            flat = (mine - right.double()).abs().amax((0, 1)).flatten(1).amax(1) if mine.dim() == 4 else None
            if scale > 1e-6:
                worst[label] = max(worst.get(label, (0, "")), (error, name))
            room = 0.06 if label in ("dgates", "dstate") else 0.02
            if error > room and scale > 1e-6:
                at = "" if flat is None else f" worst row {int(flat.argmax())}"
                faults.append(f"{label}: error {error:.3f}{at}")
        if faults or before:
            failed += [name] * bool(faults)
            say("FAIL" if faults else "right", name, "; ".join(faults))
    say(f"correct: {count - len(failed)} of {count} right; worst",
        {k: (round(v[0], 4), v[1]) for k, v in worst.items()})
    if failed and not before:
        json.dump(failed, open(FAILED, "w"))
    return int(bool(failed))


def refuse():
    """A gate above 0, and NaN, are assertions of the device."""
    import torch
    from cosformer import attention
    q, k, v = torch.randn(3, 1, 2, 100, 64, device="cuda", dtype=torch.bfloat16).unbind()
    gates = -torch.rand(1, 2, 100, device="cuda")
    gates[0, 1, 99] = torch.nan if sys.argv[-1] == "nan" else 0.5
    try:
        attention(q, k, v, causal=True, log_decay=gates, impl="hopper")
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        say("refused, right:", str(error).splitlines()[0][:200])
        os._exit(0)
    say("FAIL refuse: a gate above 0 was taken")
    os._exit(1)


# ---- times ----

def times(which):
    import torch
    import cosformer
    from cosformer import attention
    say("tree:", which, cosformer.__file__)

    def graphed(call, n):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found = []
        for _ in range(5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            a.record()
            for _ in range(n):
                graph.replay()
            b.record()
            torch.cuda.synchronize()
            found.append(a.elapsed_time(b) / n)
        return sorted(found)[2]

    def seen(call, n):
        for _ in range(4):
            call()
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(n):
                call()
            torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - begin) / n)
        return sorted(found)[2]

    def measure(shape, mode, eager):
        b, h, t, d = shape
        x = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
        q, k, v, grad = x.unbind()
        leaves = [y.detach().requires_grad_() for y in (q, k, v)]
        more, extra = {}, []
        if mode == "token":
            extra = [(-0.1 * torch.rand(b, h, t, device="cuda")).requires_grad_()]
            more = {"log_decay": extra[0]}
        if mode == "head":
            more = {"decay": [1 - 2.0 ** (-5 - n / 4) for n in range(h)]}
        if mode == "packed":
            more = {"cu_seqlens": torch.arange(0, t + 1, 1024, device="cuda", dtype=torch.int32)}

        def forward():
            with torch.no_grad():
                attention(*leaves, causal=True, **more)

        def both():
            out = attention(*leaves, causal=True, **more)
            torch.autograd.grad(out, [*leaves, *extra], grad)

        n = max(3, min(100, int(2e7 / (b * h * t))))
        row = [graphed(forward, n), graphed(both, n)]
        if eager:
            row += [seen(forward, n), seen(both, n)]
        return row

    shapes = [(8, 16, 1024, 64), (8, 16, 4096, 64), (2, 16, 16384, 64), (1, 16, 65536, 64), (4, 12, 3000, 64),
              (2, 8, 16384, 128)]
    for shape in shapes:
        try:
            eager = shape[2] <= 4096
            none, head, token = (measure(shape, mode, eager) for mode in ("none", "head", "token"))
            ratios = [a / b for a, b in zip(token, none)]
            say(which, shape, "graph fwd/both | caller fwd/both, ms: none", *(f"{x:.4f}" for x in none), "| head",
                *(f"{x:.4f}" for x in head), "| token", *(f"{x:.4f}" for x in token), "| token over none",
                *(f"{x:.3f}" for x in ratios))
        except Exception as error:  # noqa: BLE001
            say("FAIL time", shape, type(error).__name__, str(error)[:300])
            if "CUDA" in str(error):
                return 1
    try:
        batch, packed = measure((64, 16, 1024, 64), "none", True), measure((1, 16, 65536, 64), "packed", True)
        say(which, "64 x 1024: batch", *(f"{x:.4f}" for x in batch), "| packed", *(f"{x:.4f}" for x in packed),
            "| packed over batch", *(f"{a / b:.3f}" for a, b in zip(packed, batch)))
    except Exception as error:  # noqa: BLE001
        say("FAIL time packed", type(error).__name__, str(error)[:300])
    if which == "after":
        profile()
    return 0


def profile():
    """Microseconds of each kernel of a gated and of a packed call."""
    import torch
    from cosformer import attention
    from torch.profiler import ProfilerActivity
    for name, shape, packed in (("gated", (8, 16, 1024, 64), False), ("packed", (1, 16, 65536, 64), True)):
        q, k, v, grad = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16).unbind()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        more = {"log_decay": (-0.1 * torch.rand(shape[:3], device="cuda")).requires_grad_()}
        if packed:
            more = {"cu_seqlens": torch.arange(0, shape[2] + 1, 1024, device="cuda", dtype=torch.int32)}
        wanted = [*leaves, *(x for x in more.values() if x.requires_grad)]
        for _ in range(3):
            torch.autograd.grad(attention(*leaves, causal=True, **more), wanted, grad)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
            torch.autograd.grad(attention(*leaves, causal=True, **more), wanted, grad)
            torch.cuda.synchronize()
        events = sorted((e for e in seen.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
        say("profile", name, [(e.name[:32], round(e.time_range.elapsed_us(), 1)) for e in events])


def first():
    for cache in ("empty", "full"):
        pass
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "full"):
            env = {name: os.path.join(folder, name) for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
            ended = subprocess.run([sys.executable, "-m", "cosformer.bench.first_call", "gates", "8x16x1024x64", "bfloat16", "cuda"],
                                   env={**os.environ, **env}, capture_output=True, text=True)
            say("first call with gates,", cache, "cache:", ended.stdout.strip() or ended.stderr[-500:])
    code = ("import sys, torch; from cosformer import attention; x = torch.randn(3, 1, 2, 100, 64, device='cuda', dtype=torch.bfloat16);"
            "g = (-torch.rand(1, 2, 100, device='cuda')).requires_grad_(); l = [y.requires_grad_() for y in x.unbind()];"
            "cu = torch.tensor([0, 40, 100], device='cuda');"
            "o = attention(*l, causal=True, log_decay=g, cu_seqlens=cu); torch.autograd.grad(o.sum(), [*l, g]);"
            "print('triton imported:', 'triton' in sys.modules, [m for m in sys.modules if 'triton.kernels' in m])")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    say(ended.stdout.strip() or ended.stderr[-500:])
    return 0


def main(argv):
    if not argv or argv[0].isdigit():
        orchestrate(int(argv[0]) if argv else 90)
        return 0
    stage = argv[0]
    if stage == "direct":
        return direct()
    if stage == "correct":
        return correct("before" in argv)
    if stage == "refuse":
        return refuse()
    if stage == "time":
        return times(argv[1])
    if stage == "first":
        return first()
    raise SystemExit(f"unknown stage {stage}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
