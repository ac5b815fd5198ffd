"""A pretrained model is loaded, converted in two stages that can be interrupted, and saved."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import cosformer.hf as hf
from cosformer.check import check_new_folder, check_whole
from cosformer.config import differences
from cosformer.conversion.settings import Conversion
from cosformer.conversion.stages import Progress, Stage, Training, distil, match
from cosformer.conversion.texts import Batches
from cosformer.tasks import sync_names
from cosformer.training import (
    LOCK,
    Checkpoint,
    Diverged,
    begin_moments,
    comparable,
    fill,
    locked,
    read_checkpoint,
    read_json,
    resolved,
    save_pretrained,
    uninterrupted,
    write_checkpoint,
    write_json,
)

CHECKPOINT, RESULT = "conversion.safetensors", "conversion.json"
"""What a conversion can go on from, and what has come of it; the latter ends it."""
DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
"""Names in configs of the dropout of attention weights, which linear attention never forms."""
REPLACED = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
WEIGHTS = ("*.h5", "*.msgpack", "*.ot", "*.onnx", "onnx", "openvino", "checkpoint-*")
UNNEEDED = (*REPLACED, *WEIGHTS, "README.md", ".*")
"""Names in a model's folder that are not copied: its config and its weights, which the converted
model has its own of, the same weights in formats of other programs, checkpoints of its training,
its model card and hidden files. Files in folders below it are copied whatever their names are."""
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
"""Files of which a folder has one, at least, if its tokenizer is in it."""
UNFINISHED = ".unfinished-"
"""How the name of the folder begins in which a result is put together."""
REPORTS = 20
"""How often a stage tells how far it is."""
JUDGED = 8
"""Batches by which it is judged which layers had better stay softmax."""
SAVED_EVERY = 60.0
"""Seconds between two checkpoints."""


def convert_pretrained(
    model: Path | str,
    texts: Sequence[str],
    out: Path | str,
    settings: Conversion | None = None,
    *,
    device: str = "auto",
) -> Iterator[Progress]:
    """Convert a model of Transformers' and save it; iterating does the work.

        for progress in convert_pretrained("my-bert", texts, "my-cosformer"):
            print(progress)

    After `import cosformer.hf`, `AutoModel.from_pretrained(out)`, or the model's own class, loads
    what was saved. If the work was interrupted, the same call goes on from the last checkpoint. If
    it was done already, there is nothing to iterate over.

    Args:
        model: folder of an encoder or a decoder with its tokenizer, as `save_pretrained` writes it.
            Its layers must call Transformers' attention functions, as BERT and GPT-2 do.
        texts: texts of the kind that the model is for; no labels are needed.
        out: the folder to save to, which must be new, empty or that of the same conversion.
        settings: what takes the place of softmax, where, and how it is learnt.
        device: `auto` (a GPU where there is one), `cpu` or `cuda`.

    Yields:
        How far a stage is, with the error of each layer, about 20 times a stage.
    """
    out, settings = Path(out), Conversion() if settings is None else settings
    is_new, facts = not check_new_folder("out", out).exists(), _facts(Path(model), texts, settings)
    if not is_new:
        is_converted(out, facts)  # another's folder is refused before a lock is in it
    with locked(out):
        is_done = is_converted(out, facts)
        clean(out, is_done)
        if is_done:
            (out / LOCK).unlink()
            return
        try:
            converter = Converter(model, texts, settings, device=device, out=out)
        except BaseException:
            if is_new:  # a conversion that is refused leaves nothing
                (out / LOCK).unlink()
                out.rmdir()
            raise
        yield from converter.match()
        yield from converter.distil()
        converter.save()
        (out / LOCK).unlink()  # the folder is a model now, to be moved and shared


def is_converted(out: Path, wanted: dict[str, Any]) -> bool:
    """Whether a folder has the result of this conversion; one with anything else is refused."""
    if (out / RESULT).is_file():
        require_same(read_json(out / RESULT), wanted, out)
        return True
    there = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    if CHECKPOINT not in there and (wrong := sorted(there - {LOCK})):
        raise ValueError(f"out must be new, empty or a conversion, got {out} with {wrong[0]}")
    return False


def clean(out: Path, is_done: bool) -> None:
    """Remove what killed conversions left, each as large as a model; `is_done`: `out` has a result.

    Those are files and folders that never got their name, and a checkpoint beside the result.
    """
    if is_done:
        (out / CHECKPOINT).unlink(missing_ok=True)
    for path in list(out.iterdir()):
        if path.name.startswith(UNFINISHED):
            shutil.rmtree(path)
        elif path.name.startswith((f".{CHECKPOINT}.", f".{RESULT}.")):
            path.unlink()


def require_same(found: dict[str, Any], wanted: dict[str, Any], out: Path) -> None:
    """An error unless what was begun in a folder is what is asked for."""
    if wrong := differences({name: found.get(name) for name in wanted}, wanted):
        raise ValueError(
            f"out must be a new folder or that of the same conversion, got {out}, in which "
            f"{', '.join(wrong)} is another"
        )


class Converter:
    """A model under conversion: `match`, then `distil`, then `save`."""

    def __init__(
        self,
        model: Path | str,
        texts: Sequence[str],
        settings: Conversion,
        *,
        device: str = "auto",
        out: Path | None = None,
    ) -> None:
        """`out`: where checkpoints are kept; none: there are none."""
        from transformers import AutoTokenizer

        self.folder, self.out, self.settings = Path(model), out, settings
        self._facts = _facts(self.folder, texts, settings)
        self.device, self._began = torch.device(resolved(device)), time.monotonic()
        self.model = load(self.folder, self.device)
        layers, sizes = hf.find_layers(self.model)
        kept = settings.kept(len(layers))
        torch.manual_seed(settings.seed)  # what wide feature maps begin with
        plan = {
            name: hf.EXACT if n in kept else settings.mechanism for n, name in enumerate(layers)
        }
        if not any((self.folder / name).is_file() for name in TOKENIZERS):
            known = ", ".join(TOKENIZERS)
            raise ValueError(f"model must have its tokenizer beside it ({known}), got {model}")
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise ValueError(f"model must have a tokenizer with a pad or end token, got {model}")
        longest = min(self._longest() or settings.length, self.tokenizer.model_max_length)
        if settings.length > longest:
            raise ValueError(
                f"length must be at most the model's {longest} tokens, got {settings.length}"
            )
        features = settings.expansion * sizes[2]
        hf.replace_attention(self.model, hf.ConvertedConfig(plan, sizes, features, self._horizon()))
        self.batches = Batches(
            texts, self.tokenizer, batch=settings.batch, length=settings.length, seed=settings.seed
        )
        self.errors: dict[str, dict[str, float]] = {}
        self._stored = self._read()

    def match(self) -> Iterator[Progress]:
        """Stage 1. Layers that `exact_count` asks for become softmax again at its end."""
        if self._stored is not None and self._stored.facts["stage"] == "distil":
            layers = self._stored.facts["layers"]
            self._keep_exact([name for name, kind in layers.items() if kind == hf.EXACT])
            return
        stage = match(self.model, self.settings.match_steps, self.settings.match_rate)
        yield from self._train(stage)
        if self.settings.exact_count:
            worst = sorted(hf.heads_of(self.model), key=self._harm, reverse=True)
            self._keep_exact(worst[: self.settings.exact_count])

    @torch.no_grad()
    def _harm(self, layer: str) -> float:
        """The error of the last hidden states where this layer alone is replaced."""
        found = []
        for step in range(JUDGED):
            inputs = self.batches(step, self.device)
            both = []
            for but in (None, layer):
                with hf.matching(self.model, but=but):
                    both.append(self.model(**inputs, output_hidden_states=True).hidden_states[-1])
            found.append(hf.relative_error(both[1], both[0], inputs["attention_mask"]))
        return float(torch.stack(found).mean())

    @property
    def exact(self) -> list[int]:
        """Numbers of the layers that are softmax."""
        kinds = self.model.config.quantization_config.layers.values()
        return [number for number, kind in enumerate(kinds) if kind == hf.EXACT]

    def distil(self) -> Iterator[Progress]:
        """Stage 2."""
        if self.settings.distil_steps:
            teacher = load(self.folder, self.device)
            steps, highest = self.settings.distil_steps, self.settings.distil_rate
            yield from self._train(distil(self.model, teacher, steps, highest))

    def save(self) -> None:
        """Write the model, its tokenizer and what is known of the conversion; `out` is given."""
        assert self.out is not None
        seconds = self._seconds()
        with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self.out) as made:
            shutil.copytree(self.folder, made, ignore=self._unneeded, dirs_exist_ok=True)
            save_pretrained(self.model, Path(made))
            layers = self.model.config.quantization_config.layers
            result = {"layers": layers, "errors": self.errors, "seconds": round(seconds, 1)}
            _sync(Path(made))
            for path in sorted(Path(made).iterdir()):
                target = self.out / path.name
                if target.is_dir():  # of a save that was interrupted
                    shutil.rmtree(target)
                os.replace(path, target)
        sync_names(self.out)
        write_json(self.out / RESULT, self._facts | result)
        (self.out / CHECKPOINT).unlink(missing_ok=True)

    def _unneeded(self, folder: str, names: list[str]) -> set[str]:
        """Names in the model's folder, or one below it, that are not copied; `out` never is."""
        assert self.out is not None
        own = {name for name in names if Path(folder, name).resolve() == self.out.resolve()}
        if Path(folder) != self.folder:
            return own
        return own | shutil.ignore_patterns(*UNNEEDED)(folder, names)

    def _train(self, stage: Stage) -> Iterator[Progress]:
        if not stage.steps:
            return
        training = Training(stage)
        self._restore(training)
        # no stage begins with the texts of the one before
        offset = self.settings.match_steps if stage.name == "distil" else 0
        every = max(1, stage.steps // REPORTS)
        began, first, saved = time.monotonic(), training.step, time.monotonic()
        while training.step < stage.steps:
            try:
                with uninterrupted():
                    training.learn(self.batches(offset + training.step, self.device))
            except KeyboardInterrupt:
                with contextlib.suppress(Diverged):
                    self._write(training)
                raise
            is_last = training.step == stage.steps
            is_told = is_last or training.step % every == 0
            if is_told:
                self.errors[stage.name] = training.read()
            if is_last or time.monotonic() - saved > SAVED_EVERY:
                self._write(training)
                saved = time.monotonic()
            if is_told:
                pace = (time.monotonic() - began) / (training.step - first)
                left, errors = pace * (stage.steps - training.step), self.errors[stage.name]
                yield Progress(stage.name, training.step, stage.steps, errors, left)

    def _keep_exact(self, names: Sequence[str]) -> None:
        plan = self.model.config.quantization_config
        for name in names:
            module = self.model.get_submodule(name)
            if hasattr(module, "cosformer"):
                del module.cosformer
            plan.layers[name] = hf.EXACT

    def _read(self) -> Checkpoint | None:
        if self.out is None or not (self.out / CHECKPOINT).is_file():
            return None
        stored = read_checkpoint(self.out / CHECKPOINT)
        require_same(dict(stored.facts), self._facts, self.out)
        self.errors = dict(stored.facts["errors"])
        self._began -= stored.facts["seconds"]
        return stored

    def _restore(self, training: Training) -> None:
        stored = self._stored
        if stored is not None and stored.facts["stage"] == training.stage.name:
            begin_moments(training.parameters, training.optimiser)
            fill(training.tensors, stored.tensors, CHECKPOINT)
            training.step = check_whole("step", stored.facts["step"], 0)

    def _write(self, training: Training) -> None:
        training.check()
        if self.out is None:
            return
        facts = self._facts | {
            "stage": training.stage.name,
            "step": training.step,
            "layers": self.model.config.quantization_config.layers,
            "errors": self.errors,
            "seconds": self._seconds(),
        }
        write_checkpoint(self.out / CHECKPOINT, Checkpoint(training.tensors, facts))

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _longest(self) -> int | None:
        """Most tokens that the model has positions for."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def _horizon(self) -> float:
        if self.settings.horizon is not None:
            return self.settings.horizon
        if self.settings.mechanism == "cosformer" and (longest := self._longest()) is not None:
            return float(longest)
        return float(hf.MULTISCALE_HORIZON)


def load(folder: Path, device: torch.device | str = "cpu") -> Any:
    """The model of a folder in float32, by its own class, without dropout of attention weights."""
    import transformers

    if not (folder / "config.json").is_file():
        raise ValueError(f"model must be a folder with config.json, got {folder}")
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"model must be neither quantized nor converted, got {folder}")
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else transformers.AutoModel
    found = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    return found.to(device).eval()


def _sync(folder: Path) -> None:
    """Return when all files of a folder, and of those below it, are on disk with their names."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            sync_names(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _facts(model: Path, texts: Sequence[str], settings: Conversion) -> dict[str, Any]:
    """What must be the same for a conversion to go on; the arguments are checked."""
    if not isinstance(settings, Conversion):
        raise TypeError(f"settings must be a Conversion, got {type(settings).__name__}")
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"texts must be a sequence of strings, got {type(texts).__name__}")
    if not texts:
        raise ValueError("texts must be one or more, got none")
    return {
        "model": str(model.resolve()),
        "texts": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        "settings": comparable(dataclasses.asdict(settings)),
    }
