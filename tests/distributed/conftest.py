"""A group of one rank, in the process of the tests."""

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
