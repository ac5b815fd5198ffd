"""python3 directions.py ENTRY RATE OUT DATA: one run of a direction that the package does not have."""
import sys, math, dataclasses, json
import torch, torch.nn.functional as F
from torch import nn
from pathlib import Path
import cosformer.ops as ops
from cosformer.mechanisms import MECHANISMS
from cosformer.mechanisms.linear.multiscale import CosformerGated
from cosformer.recipes import STUDIES, Trial
from cosformer.recipes.study import LM
from cosformer.commands.crew_run import Work
from cosformer.commands import study_run
from cosformer.nn import layer as L
from dataclasses import replace

def grouped(groups, horizons, spread):
    class Grouped(CosformerGated):
        G = groups
        traits = replace(CosformerGated.traits, controls=tuple(f"gate{g}" for g in range(groups)))
        def control_bias(self, name):
            g = int(name[4:])
            rates = torch.tensor(ops.multiscale_decays(self.key_heads), dtype=torch.float64)
            if spread:   # every group of columns begins with a time of its own
                n = self.key_heads * groups
                all_ = torch.tensor(ops.multiscale_decays(n), dtype=torch.float64).view(self.key_heads, groups)
                rates = all_[:, g]
            return rates.logit()
        def _attend(self, q, k, v, request, impl):
            G, H = self.G, self.heads
            def split(x):
                return x.unflatten(3, (G, -1)).transpose(2, 3).flatten(1, 2)
            v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
            v1 = v1[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2)
            hs = torch.tensor([horizons[g] for g in range(G)], dtype=torch.float64)
            most = torch.log2(torch.tensor(2.0)) * (-24.0 / hs) * math.log(2.0)
            gates = torch.stack([request.controls[f"gate{g}"] for g in range(G)], 2)   # B H G T
            log = F.logsigmoid(gates.float()) + most.float().to(gates.device)[None, None, :, None]
            theta = (math.pi / (2 * hs)).repeat(H).tolist()
            same = len(set(theta)) == 1
            theta = theta[0] if same else torch.tensor(theta, dtype=torch.float64, device=q.device)
            out = ops.linear_attention(split(q), split(k), v1.to(q.dtype), feature_map="relu", causal=True, theta=theta,
                log_decay=log.flatten(1, 2), normaliser="none", impl=impl)
            out = out.unflatten(1, (H, G)).float().sum(2)
            return (out[..., :-1] / out[..., -1:].clamp(min=1e-6)).to(q.dtype)
    return Grouped

MECHANISMS["g4"] = grouped(4, [65536.0] * 4, False)
MECHANISMS["g4s"] = grouped(4, [65536.0] * 4, True)
MECHANISMS["g4h"] = grouped(4, [65536.0, 8192.0, 2048.0, 512.0], True)
MECHANISMS["g16s"] = grouped(16, [65536.0] * 16, True)
class Long(CosformerGated):
    def control_bias(self, name):
        H = self.key_heads
        r = [1 - 2.0 ** (-1 - 9.5 * h / (H - 1)) for h in range(H)]
        return torch.tensor(r, dtype=torch.float64).logit()
MECHANISMS["glong"] = Long
class Cosformer2(CosformerGated):
    """relu(x)^2 features"""
    def _attend(self, q, k, v, request, impl):
        return super()._attend(q.relu() * q.relu(), k.relu() * k.relu(), v, request, impl)
MECHANISMS["gsq"] = Cosformer2
class QkSwish(CosformerGated):
    """keys scaled by exp of a token-wise gate: importance of a key (still >= 0)"""
    traits = replace(CosformerGated.traits, controls=("gate", "share"))
    def control_bias(self, name):
        return super().control_bias(name) if name == "gate" else torch.zeros(self.key_heads, dtype=torch.float64)
    def _attend(self, q, k, v, request, impl):
        s = request.controls["share"].float().clamp(-8, 8).exp()
        return super()._attend(q, (k * s[..., None].to(k.dtype)), v, request, impl)
MECHANISMS["gexp"] = QkSwish

NS = {"norm": True, "gate": "sigmoid"}
for n in ("g4", "g4s", "g4h", "g16s", "glong", "gsq", "gexp"):
    LM["try-" + n] = {"mechanism": n, **NS}
LM["try-conv-input"] = {"mechanism": "cosformer-gated", "conv": 4, "conv_on": "input", **NS}
G = "cosformer-gated"
LM["try-win256"] = {"mechanism": f"{G}*3 local {G}*2", "options": {"local": {"window": 510}}, **NS}
LM["try-win512"] = {"mechanism": f"{G}*3 local {G}*2", "options": {"local": {"window": 1022}}, **NS}
LM["try-win128-2"] = {"mechanism": f"{G}*2 local", "options": {"local": {"window": 254}}, **NS}
LM["try-win256-2"] = {"mechanism": f"{G}*2 local", "options": {"local": {"window": 510}}, **NS}
LM["try-win128"] = {"mechanism": f"{G}*3 local {G}*2", "options": {"local": {"window": 254}}, **NS}
LM["try-win256-second"] = {"mechanism": f"{G} local {G}*4", "options": {"local": {"window": 510}}, **NS}
BIAS = {"try-bias-0.5": -0.5, "try-bias-1": -1.0}
for n in BIAS:
    LM[n] = {"mechanism": "cosformer-gated", **NS}

if __name__ == "__main__":
    entry, rate, out, data = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4]
    steps = int(sys.argv[5]) if len(sys.argv) > 5 else 1500
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if entry in BIAS:
        import cosformer.models as M
        from cosformer.training import trainer as T
        from cosformer.nn.projections import HeadProjections
        old = HeadProjections.__init__
        def new(self, *a, **k):
            old(self, *a, **k)
            self._bias_wanted = BIAS[entry]
        oldl = L.AttentionLayer.__init__
        def newl(self, *a, **k):
            oldl(self, *a, **k)
            with torch.no_grad():
                self.in_proj_bias[: 2 * self.embed_dim].fill_(BIAS[entry])
        L.AttentionLayer.__init__ = newl
    scale = "tiny" if device == "cpu" else "full"
    t = Trial("lm", entry, rate, 0, steps if scale == "full" else 6, scale)
    w = Work(t, Path(out) / t.name, data=data, device=device, graph=device == "cuda", compile=None, threads=1, jobs=8)
    row = study_run.row_of(w)
    print("DONE", entry, rate, row.what, row.value, row.config.get("first"), row.config.get("last"), row.config.get("tokens_per_second"), row.config.get("parameters"), flush=True)
