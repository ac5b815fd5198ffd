"""`cosformer export RUN --to FORMAT PATH`: a trained model as other programs load it."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosformer.check import check_new_file, check_new_folder
from cosformer.models import Classifier, parameter_count
from cosformer.tasks import Vocabulary
from cosformer.training import Predictor, export_weights, kept_vocabulary, load, save_pretrained

POSITIONAL = "run"


@dataclass(frozen=True)
class Options:
    """Write a model for other programs. hf: a folder with model and tokenizer as Hugging Face
    Transformers reads them: after `import cosformer.hf`,
    `AutoModelForCausalLM.from_pretrained(DIR)` gives the same logits. safetensors: one file with
    all weights, also of a run whose checkpoints many processes wrote in parts.

    cosformer export runs/my-run --to hf my-model

    cosformer export runs/my-run --to safetensors my-model.safetensors
    """

    run: Path
    """Folder of the run; for hf that of a language model, a masked one or a classifier of single
    sequences."""
    to: tuple[Literal["hf", "safetensors"], Path]
    """The format, and the folder to write, which must be new or empty, or the file, which must be
    new."""
    checkpoint: Literal["best", "last"] = "best"
    """The weights that were best on validation, or the last ones."""
    plugin: Path | None = None
    """Python file that registers the run's mechanism; the one of the run's config if not given."""


def run(options: Options) -> int:
    kind, path = options.to
    return _to_hf(options, path) if kind == "hf" else _to_file(options, path)


def _to_file(options: Options, path: Path) -> int:
    if check_new_file("to", path).exists():
        raise ValueError(f"to must be a new file, got {path}, which exists")
    loaded = load(options.run, options.checkpoint, device="cpu", plugin=options.plugin)
    export_weights(loaded.model, path)
    print(f"{path}: {parameter_count(loaded.model):,} parameters of {options.run}")
    return 0


def _to_hf(options: Options, folder: Path) -> int:
    import cosformer.hf as hf

    if check_new_folder("to", folder).exists() and any(folder.iterdir()):
        raise ValueError(f"to must be a folder that is new or empty, got {folder}")
    loaded = load(options.run, options.checkpoint, device="cpu", plugin=options.plugin)
    model, vocabulary = hf.to_transformers(loaded.model), kept_vocabulary(options.run)
    tokens = "no tokenizer: its tokens are not those of a text"
    if vocabulary is not None:
        _set_specials(model, vocabulary)
        tokens = f"no tokenizer: there is none for {vocabulary.kind}"
    reads = None
    if vocabulary is not None and isinstance(loaded.model, Classifier):
        predictor = Predictor.of(loaded)
        reads = predictor.reader.length
        if predictor.labels is not None:
            model.config.id2label = dict(enumerate(predictor.labels))
            model.config.label2id = {label: n for n, label in enumerate(predictor.labels)}
    with _all_or_nothing(folder) as made:
        save_pretrained(model, made)
        if vocabulary is not None and (tokenizer := vocabulary.tokenizer()) is not None:
            hf.create_tokenizer(tokenizer, reads).save_pretrained(made)
            tokens = f"a tokenizer ({vocabulary.kind}, {vocabulary.size:,} tokens)"
    print(f"{folder}: {type(model).__name__}, {tokens}")
    return 0


@contextlib.contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which then become those of `folder`, or after an error nobody's.

    A new or empty `folder` is so again after an error, and the same export can be asked for again.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as made:
            yield Path(made)
            for path in sorted(Path(made).iterdir()):
                os.replace(path, folder / path.name)
    except BaseException:
        if is_new:
            folder.rmdir()
        raise


def _set_specials(model: Any, vocabulary: Vocabulary) -> None:
    """Padding is the first token after those of the text, and no text has the tokens from there."""
    model.config.pad_token_id = vocabulary.size
    if model.can_generate():
        model.generation_config.pad_token_id = vocabulary.size
        others = range(vocabulary.size, model.config.vocab_size)
        model.generation_config.suppress_tokens = list(others)
