"""Small files under the names of the published data sets, in their formats."""

import json
import lzma

import numpy as np


def pack(path, *lines):
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode()))


def write(where):
    """Fill a data folder with all sets that are not generated, but for texts to go on with."""
    splits = ["train"] * 80 + ["dev"] * 20
    rows = [f"{s}\t{n % 2}\t{n} {'word ' * (1 + n % 40)}" for n, s in enumerate(splits)]
    pack(where / "sst2.tsv.xz", "split\tlabel\tsentence", *rows)
    rows = [f"train\t{n % 3}\tpremise {n}\t{'so ' * (n % 30)}" for n in range(90)]
    pack(where / "mnli_20k.tsv.xz", "split\tlabel\tpremise\thypothesis", *rows)
    for split in ("train", "test"):
        rows = [f"{int(n < 20)}\t9\t{n}\t{f'good{n} ' * (1 + 5 * n)}" for n in range(40)]
        pack(where / f"imdb_{split}.tsv.xz", "label\trating\tid\ttext", *rows)
    splits = ["train"] * 40 + ["valid"] * 10 + ["test"] * 10
    rows = [f"{s}\t{n % 2}\tP{n % 7}\tP{n % 5}" for n, s in enumerate(splits)]
    pack(where / "aan_pairs.tsv.xz", "split\tlabel\tdoc1\tdoc2", *rows)
    papers = [json.dumps({"id": f"P{n}", "text": "é" * (50 + 30 * n)}) for n in range(7)]
    pack(where / "aan_docs_4k.jsonl.xz", *papers)
    rng, sizes = np.random.default_rng(0), {"train": 50, "test": 20}
    x = {f"x_{name}": rng.integers(0, 256, (n, 32, 32), np.uint8) for name, n in sizes.items()}
    y = {f"y_{name}": np.arange(n) % 10 for name, n in sizes.items()}
    np.savez(where / "cifar10_gray.npz", **x, **y)
