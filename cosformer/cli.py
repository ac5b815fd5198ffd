"""The command line: `cosformer VERB [options]`. A verb is one entry of `VERBS`."""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_origin

from cosformer import __version__

VERBS: dict[str, tuple[str, str]] = {
    "demo": ("cosformer.demo.command", "cosFormer beside softmax: checked, trained, writing text"),
    "bench ops": ("cosformer.bench.ops", "time and memory of the op, as rows in results/"),
    "bench mechanisms": ("cosformer.bench.mechanisms", "the same of every mechanism"),
    "bench training": ("cosformer.bench.training", "tokens a second of training steps"),
    "bench generation": ("cosformer.bench.generation", "time of a token, near and far into a text"),
    "bench data": ("cosformer.bench.data", "how fast data sets are generated"),
    "mechanisms": ("cosformer.catalogue", "what can be compared: abilities, formulas, costs"),
    "data list": ("cosformer.data.listing", "the data sets, and which are there"),
    "data get": ("cosformer.data.get", "download published data sets, verified"),
    "data make": ("cosformer.data.make", "generate ListOps and Pathfinder"),
    "data check": ("cosformer.data.check", "verify what is there: checksums, counts"),
    "train": ("cosformer.commands.train", "train a model on a task; again: continue"),
    "evaluate": ("cosformer.commands.evaluate", "judge a trained model on a split"),
    "generate": ("cosformer.commands.generate", "text from a trained language model"),
    "runs": ("cosformer.commands.runs", "the runs of a folder: state, step, best metric"),
    "completion": ("cosformer.completion", "a script for bash, zsh or fish: verbs, flags, values"),
    "build": (
        "cosformer.ops.replay.native",
        "compile what calls the kernels on Hopper GPUs",
    ),
    "report": ("cosformer.report.readme", "rows to tables in README.md and figures in docs/"),
}
"""Verb -> the module that does it, and one line of help.

The module, loaded only when asked for, has `Options` (a frozen dataclass; its docstrings are the
help) and `run(options) -> int` (the exit code). It raises ValueError for what the user can mend.
`POSITIONAL` names the option, if any, that words in front of all flags belong to; `REPEATED` one
that may be given again and again, a value each time; `WORDS` values of options that a shell can
complete.
"""

EXTRAS = {
    "tyro": "cli",
    "tqdm": "cli",
    "matplotlib": "plot",
    "numpy": "tasks",
    "safetensors": "train",
    "tensorboard": "tensorboard",
}
"""Optional package -> the extra of this package that installs it."""

USER_ERROR = 2
READER_GONE = 141
"""What a shell reports of a program that wrote to a closed pipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code. An error of the user is one line on stderr and a 2."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # a reader that has gone is noticed here at the latest
        return code
    except BrokenPipeError:
        # as after `| head`: what is still in the buffer has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def split_verb(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The verb that begins the arguments, of one word or more, and what follows it."""
    for count in range(len(arguments), 0, -1):
        verb = " ".join(arguments[:count])
        if verb in VERBS:
            return verb, list(arguments[count:])
    return None, list(arguments)


def gathered(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments with all values of a flag behind one, as `--set a=1 --set b=2` means."""
    values, rest = list[str](), list[str]()
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        given = value if equals else next(words, None)
        if given is None:
            raise ValueError(f"{flag} must have a value, got none")
        values.append(given)
    return [*rest, flag, *values] if values else rest


def usage(verb: str, module: Any) -> str:
    """How a verb is typed, the words that need no flag as placeholders."""
    fields = {field.name: field for field in dataclasses.fields(module.Options)}
    if (bare := fields.get(getattr(module, "POSITIONAL", ""))) is None:
        return f"cosformer {verb}"
    word = bare.name.upper() + (" ..." if get_origin(bare.type) is tuple else "")
    is_needed = bare.default is dataclasses.MISSING
    return f"cosformer {verb} {word if is_needed else f'[{word}]'}"


def parse(options_type: type[Any], arguments: Sequence[str], *, prog: str) -> Any | None:
    """Options from arguments; None if the help was printed instead."""
    import tyro

    page, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(complaint):
            return tyro.cli(options_type, args=list(arguments), prog=prog)
    except SystemExit as stop:
        if stop.code in (0, None):
            # tyro knows of no words without a flag: its own usage asks for one
            _, gap, rest = page.getvalue().partition("\n\n")
            print(f"usage: {prog} [options]{gap}{rest}", end="")
            return None
        raise ValueError(f"{_first_sentence(complaint.getvalue())}; see --help") from None


def help_text(verbs: Mapping[str, tuple[str, str]], prefix: str = "") -> str:
    """Usage and one line for each verb."""
    lines = [f"usage: cosformer {prefix or 'VERB'} [options]".replace("  ", " "), ""]
    lines += [f"  {verb:<16} {line}" for verb, (_, line) in verbs.items()]
    lines += ["", "cosformer VERB --help shows the options of a verb; cosformer --version."]
    return "\n".join(lines)


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"cosformer {__version__}")
        return 0
    verb, rest = split_verb(arguments)
    if verb is None:
        return _help_or_error(arguments)
    try:
        module = importlib.import_module(VERBS[verb][0])
        if (bare := getattr(module, "POSITIONAL", None)) and rest and not rest[0].startswith("-"):
            rest = [f"--{bare}", *rest]
        if repeated := getattr(module, "REPEATED", None):
            rest = gathered(rest, f"--{repeated}")
        options = parse(module.Options, rest, prog=usage(verb, module))
        return 0 if options is None else module.run(options)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        remedy = f"pip install 'cosformer[{EXTRAS[error.name]}]'"
        return _fail(f"{verb} needs the package {error.name}: {remedy}")
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _fail(f"{verb}: {error}")
    except KeyboardInterrupt:
        return 130


def _help_or_error(arguments: Sequence[str]) -> int:
    """Help on all verbs, or on those of a group as `bench`; an error for an unknown word."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    known = {verb: entry for verb, entry in VERBS.items() if verb.split()[: len(words)] == words}
    if not known:
        return _fail(f"unknown verb {' '.join(words)!r}; known: {', '.join(VERBS)}")
    asked = len(words) < len(arguments)
    print(help_text(known, " ".join([*words, "VERB"])), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else USER_ERROR


def _first_sentence(box: str) -> str:
    """What tyro complains of: in its frame, a title, a rule, this, and hints below another rule."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)  # colours, on a terminal
    lines = [line.strip(" │") for line in plain.splitlines()]
    rules = [n for n, line in enumerate(lines) if re.match("╭|─{3}|-{3}", line)]
    sentence = " ".join(lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines).strip()
    return sentence.removeprefix("Error parsing Options: ").rstrip(".")


def _fail(message: str) -> int:
    print(f"cosformer: {message}", file=sys.stderr)
    return USER_ERROR
