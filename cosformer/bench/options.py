"""What the options of measuring verbs share: their checks, and what stands for one not given."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from cosformer.check import check_seed, check_whole


class OnDevice:
    """Options of a verb that measures on a device. Its rows go to results/NAME-DEVICE.jsonl."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Device -> option -> what stands for it there where it is not given."""
    device: Literal["cpu", "cuda"]
    out: Path | None

    @property
    def path(self) -> Path:
        return self.out or Path(f"results/{self.name}-{self.device}.jsonl")

    def given(self, option: str) -> Any:
        """The option, or what stands for it on this device."""
        value = getattr(self, option, None)
        return self.defaults[self.device].get(option) if value is None else value


def check_options(options: Any, *counts: str) -> None:
    """Refuse a bad seed, a device that is not there, and options of counts that are below 1."""
    check_seed(options.seed)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that torch can use here, got cuda")
    check_counts(options, "threads", "repeats", *counts)


def check_counts(options: Any, *names: str) -> None:
    """Refuse options that are not whole numbers from 1 on, or not one or more of them."""
    for name in names:
        value = getattr(options, name)
        if value == ():
            raise ValueError(f"{name} must be one or more whole numbers, got none")
        for count in value if isinstance(value, tuple) else (value,):
            if count is not None:
                check_whole(name, count, 1)


def check_among(name: str, values: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that names none, or one that is not known."""
    if not values or not set(values) <= set(known):
        raise ValueError(f"{name} must be among {', '.join(known)}, got {list(values)}")
