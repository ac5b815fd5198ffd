"""What NCCL and a GPU change: exchanges, copies of shards, and a run under a group of one rank."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import training_cases as cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

import cosformer
from cosformer import distributed
from cosformer.distributed import exchange
from cosformer.models import ModelConfig, create_model, recommended
from cosformer.training import ALONE, Trainer, load, train
from cosformer.training.checkpoints import Checkpoint, read, weights
from cosformer.training.checkpoints.sharded import fill_parts, write_parts
from cosformer.training.processes import in_full

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, BACKEND = "cuda", "nccl"


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    """This process, as the only rank of a group on a GPU."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKEND, init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.new_group(None, backend="gloo")
    dist.destroy_process_group()


OPTIONS = {
    "causal": {"causal": True},
    "both ways": {},
    "decay": {"decay": 0.99},
    "packed": {"causal": True, "cu_seqlens": torch.tensor([0, 300, 301, 1000])},
}


@pytest.mark.parametrize("many", [1, 16], ids=["handed on", "gathered"])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_over_a_group_is_that_of_the_process(rank, monkeypatch, name, many):
    monkeypatch.setattr(exchange, "MANY", many)
    options = {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in OPTIONS[name].items()
    }
    given = torch.randn(3, 1, 4, 1000, 64, device=DEVICE)

    def results(function, dtype):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in given)
        out = function(q, k, v, horizon=1000, **options)
        out.square().sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    right = results(cosformer.attention, torch.float64)
    usual = results(cosformer.attention, torch.float32)
    for exact, one, other in zip(
        right, usual, results(distributed.attention, torch.float32), strict=True
    ):
        error = (other - exact).norm()
        assert error <= 2 * (one - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("shared", [False, True], ids=["parameters whole", "parameters shared"])
def test_a_model_over_a_group_is_that_of_the_process(rank, shared):
    """With messages of NCCL, in the precision of training, and FSDP's if parameters are shared."""
    torch.manual_seed(0)
    fields = {"layers": 2, "width": 64, "heads": 2} | recommended("lm")
    one = create_model(ModelConfig(**fields)).to(DEVICE)
    other = distributed.split(copy.deepcopy(one))
    if shared:
        mesh, policy = init_device_mesh(DEVICE, (1,)), MixedPrecisionPolicy(torch.bfloat16)
        fully_shard(other, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(other, "summed_loss")
    tokens, found = torch.randint(256, (2, 301), device=DEVICE), []
    for model in (one, other):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model.summed_loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        every = [in_full(x.grad).float().flatten() for x in model.parameters()]
        found.append((loss.detach()[None], torch.cat(every)))
    for right, near in zip(*found, strict=True):
        assert (near - right).norm() <= 0.05 * right.norm()


def test_shards_are_copied_written_and_read_again(rank, tmp_path):
    mesh = init_device_mesh(DEVICE, (1,))
    fields = {"layers": 2, "width": 64, "heads": 2} | recommended("lm")
    one, other = (create_model(ModelConfig(**fields)).to(DEVICE) for _ in range(2))
    for model in (one, other):
        fully_shard(model, mesh=mesh)
    copies = {name: each.detach().to("cpu", copy=True) for name, each in weights(one).items()}
    assert {each.device.type for each in copies.values()} == {"cpu"}
    write_parts(tmp_path / "last.safetensors", Checkpoint(copies, {}), rank)
    stored = read(tmp_path / "last.safetensors").tensors
    fill_parts(weights(other), stored, "here", rank)
    for name, tensor in weights(one).items():
        whole = tensor.full_tensor()
        assert torch.equal(whole, weights(other)[name].full_tensor())
        assert torch.equal(whole.cpu(), stored[name])


def test_a_run_under_a_group_ends_as_that_of_one_process(rank, tmp_path):
    """It is saved at every step, while it goes on."""
    model = {"layers": 1, "width": 32, "heads": 2}
    given = {"device": DEVICE, "average": None, "model": model, "save_seconds": 0.0}
    given["compile"] = False
    one, many = (cases.config(tmp_path / name, **given) for name in ("one", "many"))
    for _ in Trainer(one, processes=ALONE).events():
        pass
    train(many)
    assert dist.is_initialized()  # the group is left as it was
    losses = [[row["loss"] for row in cases.log(x.out) if "loss" in row] for x in (one, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert load(many.out, "last", device="cpu").place.step == 24


def test_torchrun_starts_a_run_of_one_process(tmp_path):
    """Which is alone then, and has no group."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]  # a free port
    words += ["-m", "cosformer", "train", "copying", "--device", DEVICE, "--out", str(tmp_path)]
    given = ["layers=2", "width=16", "heads=2"]
    given = [f"model.{each}" for each in given] + ["budget.steps=6", "budget.batch=4"]
    given += ["log_every=2", "task.options.length=12", "evaluation.every=6", "evaluation.batches=1"]
    given += ["parallel.data=1", "parallel.shard=1", "parallel.context=1", "compile=false"]
    words += [word for each in given for word in ("--set", each)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len([row for row in cases.log(tmp_path) if "loss" in row]) == 3
