"""`cosformer convert MODEL --data my.txt --out DIR`: a softmax model becomes a cosFormer."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

from cosformer.conversion import Conversion
from cosformer.training import Diverged

POSITIONAL = "model"


@dataclass(frozen=True, kw_only=True)
class Options(Conversion):
    """Replace the softmax attention of a pretrained model of Hugging Face Transformers by
    cosFormer, and train it to do what it did: first every layer by itself, then the whole. No
    labels are needed. After `import cosformer.hf`, `AutoModel.from_pretrained(DIR)` loads the
    result.

    cosformer convert my-bert --data my.txt --out my-cosformer

    The same command goes on with a conversion that was interrupted.
    """

    model: Path
    """Folder of an encoder or a decoder with its tokenizer, as `save_pretrained` writes it."""
    data: tuple[Path, ...]
    """Texts of the kind that the model is for: files of lines, or tables (.tsv, .csv, .jsonl) with
    columns of texts; packed (.xz, .gz, .bz2) or not."""
    out: Path
    """Folder to write, which must be new, empty or that of the same conversion."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""


def run(options: Options) -> int:
    from cosformer.conversion import convert_pretrained, read_texts

    settings = Conversion(**{each.name: getattr(options, each.name) for each in fields(Conversion)})
    texts = read_texts(options.data)
    print(f"{len(texts):,} texts; errors are shares of what softmax gives", flush=True)
    try:
        for progress in convert_pretrained(
            options.model, texts, options.out, settings, device=options.device
        ):
            print(progress, flush=True)
    except KeyboardInterrupt:
        told = f"interrupted; the same command goes on with what is in {options.out}"
        print(f"cosformer: convert: {told}", file=sys.stderr)
        raise
    except Diverged as error:
        print(f"cosformer: convert: {error}; smaller rates may help", file=sys.stderr)
        return 1
    print(f"converted: {options.out}")
    return 0
