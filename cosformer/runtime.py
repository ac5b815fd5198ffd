"""How a call runs: traced, recorded, in which precision, and with which kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")
Named = TypeVar("Named", bound=tuple[Any, ...])

HAS_TRITON = find_spec("triton") is not None
PLAIN = (Tensor, Parameter)
ROOM = 180 * 2**10
"""The most shared memory, in bytes, that one Triton program of this library takes."""

NEED_REFERENCE = (
    "need impl='reference', which is quadratic; torch.func.jacrev works with every impl"
)
"""What is said of derivatives that a Function of torch cannot have."""


def eager(*tensors: Tensor) -> bool:
    """Whether operations on these tensors run at once: no tracer, mode, transform or subclass."""
    return all(type(x) in PLAIN for x in tensors) and untraced()


def untraced() -> bool:
    """Whether operations on plain tensors run at once."""
    return not (
        torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed()
    )


def transformed() -> bool:
    """Whether the call is inside a transform of `torch.func`, which kernels know nothing of."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def recorded() -> bool:
    """Whether a backward pass must be differentiable itself: for a graph, or for `torch.func`."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # compile resolves its own
        return torch.is_grad_enabled()
    return torch._C._functorch.maybe_current_level() is not None


def readable(x: Tensor) -> bool:
    """Whether the host may look at x: not in a graph or a transform, nor if it has no values."""
    if torch.compiler.is_compiling() or not has_values(x):
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_values(x: Tensor) -> bool:
    """Whether x is more than a shape: not on meta, and no tensor of a FakeTensorMode."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def mapped_over(x: object) -> bool:
    """Whether vmap maps over x, so that it has no values that the host could read."""
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return False
    return torch._C._functorch.is_batchedtensor(x)


def refuse_older_vmap(*grads: Tensor | None) -> None:
    """An error in a backward pass under autograd's own vmap, of which a Function is not asked."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        raise NotImplementedError(f"is_grads_batched=True and vectorize=True {NEED_REFERENCE}")


def renewed(state: Named, /, **parts: object) -> Named:
    """`state._replace(**parts)`; a graph of PyTorch 2.11 cannot return what `_replace` makes."""
    make: Callable[..., Named] = type(state)
    names = state._fields  # type: ignore[attr-defined]
    return make(*(parts.get(name, x) for name, x in zip(names, state, strict=True)))


def bytes_of(x: Tensor) -> Tensor:
    """The numbers of a tensor, one after another, as bytes; without a copy where that can be."""
    # of one number `contiguous` keeps any stride, and `view` takes none but 1
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)


def recomputed(function: Callable[..., Result], *args: object, draws: bool = False) -> Result:
    """`function(*args)`, computed again in the backward pass instead of kept for it.

    Transforms of torch.func know nothing of checkpoints, so that under them everything is kept;
    torch.compile decides itself what to keep. `draws`: whether the function draws random numbers.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, states and denominators: never below float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def long_dtype(x: Tensor) -> torch.dtype:
    """The dtype of long products of x.

    A GPU sums products of 16-bit numbers in float32, and a CPU has no fast ones. What is short and
    delicate (means, statistics, inverses) has `compute_dtype` all the same.
    """
    return x.dtype if x.is_cuda else compute_dtype(x.dtype)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; the meta device has no autocast."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would round products that must stay in float32."""
    # a backward pass is traced without it, and may run with it
    is_on = autocasts(x) or (torch.compiler.is_compiling() and not x.is_meta)
    return torch.autocast(x.device.type, enabled=False) if is_on else nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current device, which need not be that of their tensors."""
    if (
        not x.is_cuda
        or torch.compiler.is_compiling()
        or x.device.index == torch.cuda.current_device()
    ):
        return nullcontext()
    return torch.cuda.device(x.device)


def kernels_know(x: Tensor) -> bool:
    """Whether Triton kernels can work on x, given that the call lets them."""
    return HAS_TRITON and x.is_cuda and x.dtype != torch.float64 and x.numel() > 0


def kernels_serve(x: Tensor) -> bool:
    """Whether Triton kernels that are no operators of torch can serve x in this call."""
    return kernels_know(x) and eager(x)


def on_gpu(x: Tensor) -> bool:
    """Whether a step on x goes by kernels; a test says so of a CPU where these are interpreted."""
    return x.is_cuda


def has_room(x: Tensor) -> bool:
    """Whether the largest programs fit on the device of x; Triton's interpreter has no limit."""
    if not x.is_cuda:
        return True
    return torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor > ROOM


def under_mode() -> bool:
    """Whether a tracer or a mode sees every operation: make_fx, fake tensors, export."""
    if torch.compiler.is_compiling():
        return True
    modes: int = torch._C._len_torch_dispatch_stack()
    return bool(modes or torch._ops._len_torch_dispatch_stack_pre_dispatch())


def join_batch(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """A tensor under vmap whose mapped dimension of this size joins the batch, the first one."""
    if dim is None:
        return x.expand(size, *x.shape).flatten(0, 1)
    x = x.movedim(dim, 0)
    return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)


def join_shared(x: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """`join_batch` of None, or of a tensor whose first dimension may be 1 for the whole batch."""
    if x is None or (dim is None and x.shape[0] == 1):
        return x
    return join_batch(x, dim, size, batch)


def refuse_mapped(name: str, dim: int | None) -> None:
    """An error for an argument that vmap maps over and that cannot be."""
    if dim is not None:
        raise ValueError(f"{name} cannot be mapped over by vmap")
