"""Checkpoints of tensors that processes share, by `torch.distributed.checkpoint`.

PyTorch plans who writes what (of copies one), and what each process reads of pieces that other
processes, in another mesh, have written. Files and list are our own: with checksums, no pickle.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from cosformer.tasks import sync_names
from cosformer.training.checkpoints.file import KIND, Checkpoint, require_like, write_list
from cosformer.training.checkpoints.parts import (
    DTYPES,
    Cut,
    Listed,
    Parts,
    Piece,
    checksum,
    file_of,
    folder_of,
    put,
)
from cosformer.training.processes import Lost


def write_parts(path: Path, checkpoint: Checkpoint, group: dist.ProcessGroup) -> None:
    """Replace a checkpoint by what all processes of a group have of it, at once.

    An error of any process ends all: there with its own error, elsewhere with `Lost`.
    """
    writer = _Writer(path, checkpoint.facts)
    try:
        save(dict(checkpoint.tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        own = error.failures.get(dist.get_rank(group))
        if own is not None:
            raise own[0] from None
        raise Lost(f"rank {rank} has failed: {cause}") from error


def fill_parts(
    wanted: Mapping[str, Tensor], stored: Parts, where: str, group: dist.ProcessGroup
) -> None:
    """Copy into tensors, of which processes have parts, what a checkpoint in parts has of them.

    The processes need not be those that wrote it: each reads the pieces that it has a part of.
    """
    require_like(stored, wanted, where)
    try:
        load(dict(wanted), storage_reader=_Reader(stored), process_group=group)
    except CheckpointException as error:
        raise ValueError(f"{where}: {min(error.failures.items())[1][0]}") from error


class _Writer(StorageWriter):
    """One file for each process, then the list of all pieces by the first of them."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts, self.token = path, facts, ""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # never the folder of an earlier attempt, which the list may still name
        self.token = secrets.token_hex(8)
        return [replace(plan, storage_data=(self.token, n)) for n, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        token, number = plan.storage_data
        tensors, results = dict[str, Tensor](), list[WriteResult]()
        for item in plan.items:
            assert item.tensor_data is not None  # there is nothing but tensors
            chunk = item.tensor_data.chunk
            if chunk.sizes.numel():  # a process may have none of a small tensor
                name, tensor = item.index.fqn, planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                assert name not in tensors  # a process has one piece of a tensor
                tensors[name] = tensor.detach().contiguous()
                offsets, shape = tuple(chunk.offsets), tuple(chunk.sizes)
                piece = Piece(number, offsets, shape, checksum(tensors[name]))
                results.append(WriteResult(item.index, tensor.nbytes, piece))
        if tensors:
            put(file_of(self.path, token, number), tensors, {"kind": f"{KIND}, part {number}"})
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pieces: dict[str, list[Piece]] = {name: [] for name in metadata.state_dict_metadata}
        for each in (each for of_process in results for each in of_process):
            pieces[each.index.fqn].append(each.storage_data)
        cuts = {}
        for name, about in metadata.state_dict_metadata.items():
            assert isinstance(about, TensorStorageMetadata)
            dtype = str(about.properties.dtype).removeprefix("torch.")
            cuts[name] = Cut(dtype, tuple(about.size), tuple(pieces[name]))
        sync_names(folder_of(self.path))
        write_list(self.path, Listed(self.token, cuts), self.facts)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # a checkpoint is named by its path alone


class _Reader(StorageReader):
    """The pieces that a process needs."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {}
        stored = {}
        for name, cut in self.parts.listed.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.shape))
                for each in cut.pieces
            ]
            of = TensorProperties(DTYPES[cut.dtype])
            tensors[name] = TensorStorageMetadata(of, torch.Size(cut.shape), chunks)
            for chunk, piece in zip(chunks, cut.pieces, strict=True):
                stored[MetadataIndex(name, chunk.offsets)] = piece
        return Metadata(tensors, storage_data=stored)  # type: ignore[arg-type]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            piece = self.parts.read(index.fqn, self.stored[index])
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            wanted = planner.resolve_tensor(item).detach()
            wanted.copy_(piece[tuple(slice(at, at + size) for at, size in ends)])
            planner.commit_tensor(item, wanted)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
