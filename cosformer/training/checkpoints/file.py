"""Checkpoints: one safetensors file, or a list of parts; whole or not at all, without pickle."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosformer.training.checkpoints.parts import (
    Listed,
    Parts,
    checksum,
    folder_of,
    listed,
    put,
    sweep,
)
from cosformer.training.processes import laid_like

FORMAT, IN_PARTS = 3, 4
"""Numbers of the layouts: of a file with all tensors, and of one with a list of parts; raised when
old files can no longer be read as they are."""
KIND = "cosformer checkpoint"
EXTRA = "_extra_state"
"""The last part of a name in the state of a model, for what a module keeps beside its tensors."""
LIST = "parts"
"""The tensor, of bytes, that is the list of parts."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, as `model.head.weight`, and facts that JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors below `name.`, which is cut off; none if there is no such part."""
        prefix = name + "."
        names = [each for each in self.tensors if each.startswith(prefix)]
        return {each.removeprefix(prefix): self.tensors[each] for each in names}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file at once; whatever happens, the old one or the new one is there."""
    _put(path, checkpoint, FORMAT)
    sweep(path, None)


def write_list(path: Path, parts: Listed, facts: Mapping[str, Any]) -> None:
    """Replace the file at once by the list of parts that all processes have written."""
    _put(path, Checkpoint({LIST: parts.written()}, facts), IN_PARTS)
    sweep(path, parts.token)


def _put(path: Path, checkpoint: Checkpoint, number: int) -> None:
    about = {"kind": KIND, "format": str(number), "facts": json.dumps(dict(checkpoint.facts))}
    tensors = {name: each.detach().cpu().contiguous() for name, each in checkpoint.tensors.items()}
    about["checksum"] = _checksum(tensors, about["facts"])
    put(path, tensors, about)


def read(path: Path) -> Checkpoint:
    """A checkpoint that `write` wrote; anything else is an error, and nothing in it is executed.

    Tensors in parts are read, and compared with their checksums, when they are asked for.
    """
    import safetensors

    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, got {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            number = _format(path, about)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"checkpoint must be a whole safetensors file, got {path}: {error}"
        ) from None
    try:
        facts = json.loads(about["facts"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint must hold facts in JSON, got {path}: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"facts of {path} must be an object, got {type(facts).__name__}")
    if about.get("checksum") != _checksum(tensors, about["facts"]):
        raise ValueError(f"checkpoint must be as it was written, got {path}: bytes have changed")
    if number == FORMAT:
        return Checkpoint(tensors, facts)
    try:
        return Checkpoint(Parts(path, listed(tensors[LIST])), facts)
    except (ValueError, KeyError) as error:
        raise ValueError(f"checkpoint must list its parts, got {path}: {error}") from None


def clean(path: Path) -> None:
    """Remove parts that processes wrote and did not live to list; a broken file keeps them all."""
    if not folder_of(path).is_dir():
        return
    if not path.is_file():
        sweep(path, None)
        return
    with contextlib.suppress(ValueError):
        found = read(path).tensors
        sweep(path, found.listed.token if isinstance(found, Parts) else None)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model by name; a tensor that has two names, as tied weights, is there once."""
    owner = _owner(model)
    return {name: tensor for name, tensor in model.state_dict().items() if owner[name] == name}


def load_weights(model: nn.Module, stored: Mapping[str, Tensor], where: str) -> None:
    """Copy a stored state into a model of the same shape."""
    require_like(stored, weights(model), where)
    owner = _owner(model)
    own = model.state_dict()
    model.load_state_dict({name: laid_like(stored[owner[name]], own[name]) for name in owner})


def fill(wanted: Mapping[str, Tensor], stored: Mapping[str, Tensor], where: str) -> None:
    """Copy stored tensors into those of the same names; of one in parts each process its own."""
    require_like(stored, wanted, where)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(laid_like(stored[name], tensor))


def set_extra_states(model: nn.Module, filled: Mapping[str, Tensor], prefix: str) -> None:
    """Give modules what they keep beside tensors of their own, which `fill` has filled copies of.

    `prefix`: what stands before the names of the model's state in `filled`.
    """
    for name, module in model.named_modules():
        found = filled.get(f"{prefix}{name}.{EXTRA}")
        if found is not None:
            module.set_extra_state(found)


def require_like(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """An error unless names, shapes and dtypes are the same: kernels trust them."""
    stored = stored.outline() if isinstance(stored, Parts) else stored
    if wrong := sorted(wanted.keys() ^ stored.keys()):
        raise ValueError(
            f"{where} must have the tensors of the model, got a difference: {wrong[0]}"
        )
    for name, tensor in wanted.items():
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            rule, found = (f"{list(each.shape)} {each.dtype}" for each in (tensor, stored[name]))
            raise ValueError(f"{name} in {where} must be {rule}, got {found}")


def _checksum(tensors: Mapping[str, Tensor], facts: str) -> str:
    named = [each for name in sorted(tensors) for each in (name.encode(), tensors[name])]
    return checksum(facts.encode(), *named)


def _owner(model: nn.Module) -> dict[str, str]:
    """Name of a tensor in the state -> the first name under which it is there."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _format(path: Path, about: Mapping[str, str]) -> int:
    if about.get("kind") != KIND or "facts" not in about:
        raise ValueError(f"checkpoint must be one that cosformer wrote, got {path}")
    if about.get("format") not in (str(FORMAT), str(IN_PARTS)):
        raise ValueError(
            f"checkpoint must have format {FORMAT} or {IN_PARTS}, got {about.get('format')} in "
            f"{path}: use the version of cosformer that wrote it"
        )
    return int(about["format"])
