"""Checkpoints: one safetensors file each, written whole or not at all, read without pickle."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cosformer.tasks import replacing
from cosformer.training.processes import laid_like

FORMAT = 3
"""Number of the layout below; raised when old files can no longer be read as they are."""
KIND = "cosformer checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, as `model.head.weight`, and facts that JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors below `name.`, which is cut off; none if there is no such part."""
        prefix = name + "."
        return {k.removeprefix(prefix): t for k, t in self.tensors.items() if k.startswith(prefix)}


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the file at once; whatever happens, the old one or the new one is there."""
    import safetensors.torch

    about = {"kind": KIND, "format": str(FORMAT), "facts": json.dumps(dict(checkpoint.facts))}
    tensors = {name: each.detach().cpu().contiguous() for name, each in checkpoint.tensors.items()}
    about["checksum"] = _checksum(tensors, about["facts"])
    content = safetensors.torch.save(tensors, about)
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        kept = "the one before it is kept" if path.exists() else "there is none before it"
        message = f"{error.strerror}: checkpoint of {len(content):,} bytes not written, {kept}"
        raise OSError(error.errno, message, str(path)) from error


def read(path: Path) -> Checkpoint:
    """A checkpoint that `write` wrote; anything else is an error, and nothing in it is executed."""
    import safetensors

    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, got {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
            _check_kind(path, about)
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
    return Checkpoint(tensors, facts)


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


def require_like(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """An error unless names, shapes and dtypes are the same: kernels trust them."""
    if wrong := sorted(wanted.keys() ^ stored.keys()):
        raise ValueError(
            f"{where} must have the tensors of the model, got a difference: {wrong[0]}"
        )
    for name, tensor in wanted.items():
        if (tensor.shape, tensor.dtype) != (stored[name].shape, stored[name].dtype):
            rule, found = (f"{list(each.shape)} {each.dtype}" for each in (tensor, stored[name]))
            raise ValueError(f"{name} in {where} must be {rule}, got {found}")


def _checksum(tensors: Mapping[str, Tensor], facts: str) -> str:
    """CRC-32 of names, bytes and facts, by which a flipped bit is noticed."""
    total = zlib.crc32(facts.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _owner(model: nn.Module) -> dict[str, str]:
    """Name of a tensor in the state -> the first name under which it is there."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _check_kind(path: Path, about: Mapping[str, str]) -> None:
    if about.get("kind") != KIND or "facts" not in about:
        raise ValueError(f"checkpoint must be one that cosformer wrote, got {path}")
    if about.get("format") != str(FORMAT):
        raise ValueError(
            f"checkpoint must have format {FORMAT}, got {about.get('format')} in {path}: "
            "use the version of cosformer that wrote it"
        )
