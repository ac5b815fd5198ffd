"""The command line: `cosformer VERB [options]`. A verb is one entry of `VERBS`."""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cosformer import __version__

VERBS: dict[str, tuple[str, str]] = {
    "demo": (
        "cosformer.demo.command",
        "cosFormer beside softmax: checked, trained, shown on a page",
    ),
    "bench ops": ("cosformer.bench.ops", "time and memory of the op, as rows in results/"),
    "bench mechanisms": ("cosformer.bench.mechanisms", "time and memory of every mechanism"),
    "bench training": ("cosformer.bench.training", "tokens a second of training steps"),
    "bench generation": ("cosformer.bench.generation", "time of a token, near and far into a text"),
    "bench data": ("cosformer.bench.data", "how fast data sets are generated"),
    "bench conversion": ("cosformer.bench.conversion", "what a converted encoder keeps on STS-B"),
    "mechanisms": ("cosformer.catalogue", "what can be compared: abilities, formulas, costs"),
    "data list": ("cosformer.data.listing", "the data sets, and which are there"),
    "data get": ("cosformer.data.get", "download published data sets, verified"),
    "data make": ("cosformer.data.make", "generate ListOps and Pathfinder"),
    "data check": ("cosformer.data.check", "verify what is there: checksums, counts"),
    "train": ("cosformer.commands.train", "train a model on a task, or go on with its run"),
    "evaluate": ("cosformer.commands.evaluate", "judge a trained model on a split"),
    "generate": ("cosformer.commands.generate", "text from a trained language model"),
    "look": ("cosformer.commands.look", "where heads look and what models write, as rows"),
    "predict": ("cosformer.commands.predict", "labels of texts from a trained classifier"),
    "export": ("cosformer.commands.export", "a trained model for Hugging Face Transformers"),
    "convert": ("cosformer.commands.convert", "a pretrained softmax model becomes a cosFormer"),
    "study": ("cosformer.commands.study", "many mechanisms under one protocol, side by side"),
    "reproduce": ("cosformer.commands.reproduce", "published tables, measured anew, resumable"),
    "reproduce speed": ("cosformer.bench.classifier", "the paper's table of speed and memory"),
    "reproduce probes": ("cosformer.commands.reproduce_probes", "what mechanisms remember"),
    "runs": ("cosformer.commands.runs", "the runs of a folder: state, step, best metric"),
    "completion": ("cosformer.completion", "a script for bash, zsh or fish: verbs, flags, values"),
    "report": ("cosformer.report.readme", "rows to tables, figures and a page to look at"),
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
    "docstring_parser": "cli",
    "tqdm": "cli",
    "matplotlib": "plot",
    "numpy": "tasks",
    "safetensors": "train",
    "tokenizers": "train",
    "transformers": "hf",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""Optional package -> the extra of this package that installs it."""

HELP_COLUMN = 24
"""Where the help says what an option means."""
USER_ERROR = 2
INTERRUPTED, TERMINATED, READER_GONE = 130, 143, 141
"""What a shell reports of a program that ended by Ctrl-C, by SIGTERM, or with its pipe closed."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: whatever ends well after Ctrl-C does so here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code. An error of the user is one line on stderr and a 2."""
    try:
        with _signals():
            code = _run(list(sys.argv[1:] if argv is None else argv), is_program=argv is None)
        sys.stdout.flush()  # a reader that has gone is noticed here at the latest
        return code
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
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
        given = value if equals else next(words, "")
        if not equals and (not given or given.startswith("--")):  # the next flag
            raise ValueError(f"{flag} must have a value, got {given or 'none'}")
        values.append(given)
    return [*rest, flag, *values] if values else rest


def usage(verb: str, module: Any) -> str:
    """How a verb is typed, the words that need no flag as placeholders."""
    fields = {field.name: field for field in dataclasses.fields(module.Options)}
    if (bare := fields.get(getattr(module, "POSITIONAL", ""))) is None:
        return f"cosformer {verb}"
    word = bare.name.upper() + (" ..." if get_origin(bare.type) is tuple else "")
    is_needed = bare.default is MISSING
    return f"cosformer {verb} {word if is_needed else f'[{word}]'}"


def parse(options_type: type[Any], arguments: Sequence[str], *, prog: str) -> Any | None:
    """Options from arguments; None if the help was printed instead."""
    import tyro

    paths = {
        flag for flag, hint in _hints(options_type).items() if flag == "--data" or _is_path(hint)
    }
    for flag in paths:
        if "" in _values(arguments, flag):
            raise ValueError(f"{flag} must be a path, got ''; see --help")  # not the folder here
    if {"-h", "--help"} & set(arguments):
        print(f"usage: {prog} [options]\n\n{options_text(options_type)}")
        return None
    arguments = [_expanded(word, paths) for word in arguments]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options_type, args=list(arguments), prog=prog)
    except SystemExit:
        sentence = _first_sentence(complaint.getvalue())
        told = _plain(sentence, options_type, arguments, prog)
        raise ValueError(f"{told}; see --help") from None


def options_text(options_type: type[Any]) -> str:
    """What a verb does, and its options: how each is typed, what it means and its default."""
    from docstring_parser import parse_from_object

    width = min(100, shutil.get_terminal_size().columns)
    parts = inspect.cleandoc(options_type.__doc__ or "").split("\n\n")
    text = [part if part.startswith("cosformer ") else fill(part, width) for part in parts]
    kinds = reversed(options_type.__mro__[:-1])
    found = [each for kind in kinds for each in parse_from_object(kind).params]
    said = {each.arg_name: " ".join((each.description or "").split()) for each in found}
    rows = [("-h, --help", "show this and exit")]
    known = zip(_hints(options_type).items(), dataclasses.fields(options_type), strict=True)
    for (flag, hint), field in sorted(known, key=lambda each: each[1].default is not MISSING):
        typed = f"{flag}, --no-{flag[2:]}" if hint is bool else f"{flag} {_placeholder(hint)}"
        rows.append((typed, said.get(field.name, "") + _default(field)))
    lines = list[str]()
    for typed, meaning in rows:
        column = wrap(meaning, width - HELP_COLUMN, break_on_hyphens=False)
        if len(typed) > HELP_COLUMN - 3:  # two blanks before, one behind
            column = ["", *column]
        lines += [f"  {typed:<{HELP_COLUMN - 2}}{column[0] if column else ''}".rstrip()]
        lines += [" " * HELP_COLUMN + line for line in column[1:]]
    return "\n\n".join([*text, "\n".join(["options:", *lines])])


def help_text(verbs: Mapping[str, tuple[str, str]], prefix: str = "") -> str:
    """Usage and one line for each verb."""
    lines = [f"usage: cosformer {prefix or 'VERB'} [options]".replace("  ", " "), ""]
    lines += [f"  {verb:<16} {line}" for verb, (_, line) in verbs.items()]
    lines += ["", "cosformer VERB --help shows the options of a verb; cosformer --version."]
    return "\n".join(lines)


def _run(arguments: list[str], *, is_program: bool) -> int:
    """`is_program`: whether the process is there for this verb alone."""
    if arguments == ["--version"]:
        print(f"cosformer {__version__}")
        return 0
    verb, rest = split_verb(arguments)
    if verb is None:
        return _help_or_error(arguments)
    try:
        with _quiet_interrupts() if is_program else contextlib.nullcontext():
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


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM ends a verb as Ctrl-C does, where nobody else handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: Any) -> None:
    raise Terminated


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process at once, without a traceback.

    Nothing is at stake during imports, and an exception within one of torch's aborts or is lost.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    ours = (signal.default_int_handler, _terminate)  # handlers of others stay
    before = {n: handler for n in numbers if (handler := signal.getsignal(n)) in ours}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _help_or_error(arguments: Sequence[str]) -> int:
    """Help on all verbs, or on those of a group as `bench`; an error for an unknown word."""
    words = [word for word in arguments if word not in ("-h", "--help")]
    known = {verb: entry for verb, entry in VERBS.items() if verb.split()[: len(words)] == words}
    if not known:
        groups = {verb.split()[0] for verb in VERBS if " " in verb}
        word = " ".join(words[: 2 if words[0] in groups else 1])
        return _fail(f"unknown verb {word!r}{_meant_verb(words)} Known: {', '.join(VERBS)}")
    asked = len(words) < len(arguments)
    print(help_text(known, " ".join([*words, "VERB"])), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else USER_ERROR


def _meant_verb(words: Sequence[str]) -> str:
    """The verb that is nearest by letters; one that is glued to its argument is cut off."""
    for verb in sorted(VERBS, key=len, reverse=True):
        glued = words[0].removeprefix(verb.replace(" ", "-"))
        if words[0] == glued:
            continue
        # an option keeps its two dashes; a single letter is a slip and no argument
        argument = glued.lstrip(" =_") if "--" in glued else glued.lstrip(" =_-")
        return f": did you mean cosformer {f'{verb} {argument}' if len(argument) > 1 else verb}?"
    near = difflib.get_close_matches(" ".join(words[:2]), VERBS, 1, 0.8)
    near = near or difflib.get_close_matches(words[0], VERBS, 1)
    return f": did you mean cosformer {near[0]}?" if near else "."


def _plain(sentence: str, options_type: type[Any], arguments: Sequence[str], prog: str) -> str:
    """What tyro complains of, by the option's own name and rule."""
    hints = _hints(options_type)
    if sentence.startswith("Missing from"):
        return _missing(options_type, arguments, prog)
    if (found := re.match(r"Missing value for argument '(--[\w-]+)'", sentence)) or (
        found := re.match(r"(?:Error parsing|invalid choice .* argument) '?(--[\w-]+)", sentence)
    ):
        given = _values(arguments, found[1])
        got = repr(" ".join(given)) if given else "no value"
        return f"{found[1]} must be {_rule(hints[found[1]])}, got {got}"
    if found := re.match(r"Unrecognized options?: ([^,=]+)", sentence):
        near = difflib.get_close_matches(found[1], hints, 1)
        kind = "option" if found[1].startswith("-") else "word"
        return f"unknown {kind} {found[1]!r}" + (f"; did you mean {near[0]}?" if near else "")
    return sentence


def _missing(options_type: type[Any], arguments: Sequence[str], prog: str) -> str:
    """Which options have no default and were not given."""
    typed = {word.partition("=")[0] for word in arguments}
    flags = [
        flag
        for flag, field in zip(_hints(options_type), dataclasses.fields(options_type), strict=True)
        if field.default is MISSING and flag not in typed
    ]
    bare = next((flag for flag in flags if flag[2:].upper() in prog.split()), None)
    if bare is not None:
        got = repr(" ".join(arguments)) if arguments else "nothing"
        return f"{bare[2:].upper()} must come first, as in `{prog}`, got {got}"
    return f"{', '.join(flags)} must be given"


def _hints(options_type: type[Any]) -> dict[str, Any]:
    """What the value of each flag may be."""
    hints = get_type_hints(options_type)
    names = [field.name for field in dataclasses.fields(options_type)]
    return {f"--{name.replace('_', '-')}": hints[name] for name in names}


def _expanded(word: str, flags: Collection[str]) -> str:
    """A word with the user's folder for the ~ in `--out=~/a`, which a shell leaves as it is."""
    flag, equals, value = word.partition("=")
    return flag + equals + os.path.expanduser(value) if flag in flags else word


def _is_path(hint: Any) -> bool:
    return hint is Path or any(map(_is_path, get_args(hint)))


def _values(arguments: Sequence[str], flag: str) -> list[str]:
    """The words that were typed for a flag."""
    values = list[str]()
    for word in reversed(arguments):
        if word == flag or word.startswith(f"{flag}="):
            return ([word.partition("=")[2]] if "=" in word else []) + values[::-1]
        values = [] if word.startswith("--") else [*values, word]
    return []


def _rule(hint: Any) -> str:
    """What a value must be, in words."""
    inner = [part for part in get_args(hint) if part not in (type(None), Ellipsis)]
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        if len(set(inner)) == 1:
            return f"values that are each {_rule(inner[0])}"
        return " and ".join(map(_rule, inner))
    if inner:
        return " or ".join(map(_rule, inner))
    plain = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
    return plain.get(hint, "text")


def _placeholder(hint: Any) -> str:
    """What stands behind a flag, in capitals."""
    inner = [_placeholder(part) for part in get_args(hint) if part not in (type(None), Ellipsis)]
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(str, get_args(hint)))}}}"
    if get_origin(hint) is tuple:
        return " ".join(inner) + (" ..." if Ellipsis in get_args(hint) else "")
    plain = {int: "INT", float: "NUMBER", Path: "PATH"}
    return "|".join(inner) or plain.get(hint, "TEXT")


def _default(field: dataclasses.Field[Any]) -> str:
    """The default of an option, in brackets; nothing where its text says what happens then."""
    value = field.default
    if value is MISSING:
        return " (required)"
    if value is None or value == ():
        return ""
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple) else value})"


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
