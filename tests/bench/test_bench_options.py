"""Options of benchmarks and demo: a bad one is named with its value before anything is measured."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cosformer.bench import classifier, data, generation, mechanisms, ops, training
from cosformer.bench import conversion as converted
from cosformer.demo import command as demo

HERE = Path()
converting = functools.partial(converted.Options, model=HERE, data=(HERE,), pairs=HERE)
conversion = SimpleNamespace(Options=converting)  # with what it cannot do without
BAD = [
    (ops, {"batch": 0}, "batch must be a whole number from 1 on, got 0"),
    (ops, {"lengths": ()}, "lengths must be one or more whole numbers, got none"),
    (ops, {"positions": (-1,)}, "positions must not be negative"),
    (ops, {"candidates": ("magic",)}, "candidates must be among chunked, reference, decay"),
    (ops, {"candidates": ()}, "candidates must be among"),
    (ops, {"candidates": ("auto",)}, "candidates must be among chunked, reference, decay"),
    (ops, {"shapes": ()}, "shapes must be one or more of"),
    (ops, {"shapes": ((1, 8, 0, 64),)}, "shapes must be one or more of"),
    (ops, {"shapes": ((1, 8, 64),)}, "shapes must be one or more of"),
    (ops, {"shapes": ((1, 8, 8, 64),), "lengths": (8,)}, "lengths, shapes and cells exclude each"),
    (ops, {"cells": ("8x16",)}, r"cells must be among 8x16x1024x64, .* got \['8x16'\]"),
    (ops, {"parts": ("steps",)}, "parts must be among cells, growth, positions, got .'steps'"),
    (mechanisms, {"names": ("sofmax",)}, "names must be one of .*, got 'sofmax'.* 'softmax'"),
    (mechanisms, {"names": ("fla-delta",)}, "names with fla-delta need a GPU and fla-core, got"),
    (mechanisms, {"seconds": 0.0}, "seconds must be above 0"),
    (training, {"mechanisms": ()}, "mechanisms must be among cosformer, "),
    (training, {"lengths": (1000,)}, "tokens must be a multiple of every length, got 4096"),
    (training, {"tokens": 0}, "tokens must be a whole number from 1 on, got 0"),
    (training, {"vocabulary": 0}, "vocabulary must be a whole number from 1 on, got 0"),
    (generation, {"seed": -1}, "seed must be a whole number from 0 on, got -1"),
    (generation, {"positions": ()}, "positions must be one or more whole numbers, got none"),
    (generation, {"mechanisms": ("linformer",)}, "mechanisms must be among cosformer, "),
    (conversion, {"candidates": ("cosformer two",)}, "candidates must be a mechanism and perhaps"),
    (conversion, {"candidates": ("softmax",)}, "mechanism must be one of cosformer-multiscale, co"),
    (conversion, {"exact": (1,)}, "exact and exact_count must not be given"),
    (classifier, {"only": ("softmx",)}, "only must be one of cosformer, .*got 'softmx'"),
    (classifier, {"minutes": 0.0}, "minutes must be above 0"),
    (data, {"listops": 0}, "listops must be a whole number from 1 on, got 0"),
    (demo, {"lengths": (8, 0)}, "lengths must be one or more positive numbers"),
    (demo, {"seconds": 0}, "seconds must be above 0, got 0"),
    (demo, {"seed": 2**30}, f"seed must be below {2**30}, got {2**30}"),
]
SHARED = [
    (ops, mechanisms, training, generation, conversion, {"device": "cuda"}, "got cuda"),
    (
        ops,
        mechanisms,
        training,
        classifier,
        {"repeats": 0},
        "repeats must be a whole number from 1 on, got 0",
    ),
    (ops, mechanisms, training, {"seed": 2**63}, f"seed must be below {2**63}, got {2**63}"),
    (ops, mechanisms, training, conversion, {"lengths": (8, 0)}, "lengths must be a whole number"),
    (training, generation, {"preset": "giant"}, "preset must be one of tiny, .*, got 'giant'"),
]
BAD += [(module, given, said) for *modules, given, said in SHARED for module in modules]


@pytest.mark.parametrize(("module", "given", "message"), BAD)
def test_a_bad_option_is_named_with_its_value(module, given, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        module.Options(**given)
