"""`cosformer completion SHELL`: a script by which a shell completes verbs, flags and values.

The words are in the script: a shell must not wait for PyTorch to load.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from cosformer.cli import VERBS

POSITIONAL = "shell"


@dataclass(frozen=True)
class Options:
    """Print a script; bash: eval "$(cosformer completion bash)", in ~/.bashrc to keep it.

    zsh: the same in ~/.zshrc, after compinit. fish: cosformer completion fish | source.
    """

    shell: Literal["bash", "zsh", "fish"]
    """The shell that the script is for."""


@dataclass(frozen=True)
class Verb:
    """What may follow a verb."""

    flags: Mapping[str, tuple[str, ...] | None]
    """Flag, as `--device` -> its values, none of them known or all; None: it takes no value."""
    words: tuple[str, ...]
    """Values that need no flag."""


def run(options: Options) -> int:
    known = {name: verb(importlib.import_module(module)) for name, (module, _) in VERBS.items()}
    print(SCRIPTS[options.shell](known), end="")
    return 0


def verb(module: Any) -> Verb:
    """What the options of a verb's module take."""
    hints, known = get_type_hints(module.Options), getattr(module, "WORDS", {})
    flags: dict[str, tuple[str, ...] | None] = {"--help": None}
    for field in dataclasses.fields(module.Options):
        name, hint = field.name.replace("_", "-"), hints[field.name]
        if hint is bool:
            flags |= {f"--{name}": None, f"--no-{name}": None}
        else:
            flags[f"--{name}"] = tuple(known.get(field.name, _literals(hint)))
    bare = getattr(module, "POSITIONAL", None)
    return Verb(flags, (flags[f"--{bare}"] if bare else None) or ())


def bash(known: Mapping[str, Verb]) -> str:
    """What does not begin like a known word is completed as a file."""
    return f"""_cosformer() {{
  local line="${{COMP_WORDS[*]:1:COMP_CWORD-1}} " previous="${{COMP_WORDS[COMP_CWORD-1]}}" found=""
{_cases(known)}
  COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _cosformer cosformer
"""


def zsh(known: Mapping[str, Verb]) -> str:
    return f"""_cosformer() {{
  local line="${{words[2,CURRENT-1]}} " previous="${{words[CURRENT-1]}}" found=""
{_cases(known)}
  compadd -- ${{=found}} || _files
}}
compdef _cosformer cosformer
"""


def fish(known: Mapping[str, Verb]) -> str:
    lines = [
        "function __cosformer_after",
        "    set -l line (string join ' ' -- (commandline -opc)[2..])",
        '    string match -q -- "$argv[1] *" "$line "',
        "end",
        "function __cosformer_at",
        "    set -l line (string join ' ' -- (commandline -opc)[2..])",
        '    test "$line" = "$argv[1]"',
        "end",
    ]
    for prefix, words in _following(known).items():
        lines.append(f"complete -c cosformer -f -n '__cosformer_at \"{prefix}\"' -a '{words}'")
    for name, each in known.items():
        begin = f"complete -c cosformer -n '__cosformer_after \"{name}\"'"
        if each.words:
            lines.append(f"{begin} -a '{' '.join(each.words)}'")
        for flag, values in each.flags.items():
            value = f" -x -a '{' '.join(values)}'" if values else " -r"
            lines.append(f"{begin} -l {flag[2:]}{'' if values is None else value}")
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}


def _cases(known: Mapping[str, Verb]) -> str:
    """Sets `found`, which bash and zsh write alike; the longest verb that fits comes first."""
    lines = ['  case "$line" in']
    for name in sorted(known, key=len, reverse=True):
        lines.append(f'    "{name} "*)')
        lines.append(f'      found="{" ".join([*known[name].words, *known[name].flags])}"')
        lines.append('      case "$previous" in')
        for flag, values in known[name].flags.items():
            if values is not None:
                lines.append(f'        {flag}) found="{" ".join(values)}" ;;')
        lines.append("      esac")
        lines.append("      ;;")
    for prefix, words in sorted(_following(known).items(), reverse=True):
        lines.append(f'    "{prefix + " " if prefix else " "}"*) found="{words}" ;;')
    return "\n".join([*lines, "  esac"])


def _following(known: Mapping[str, Verb]) -> dict[str, str]:
    """Beginning of a verb, "" first -> the words that may come next."""
    found: dict[str, dict[str, None]] = {}
    for name in known:
        words = name.split()
        for count, word in enumerate(words):
            found.setdefault(" ".join(words[:count]), {})[word] = None
    return {prefix: " ".join(words) for prefix, words in found.items()}


def _literals(hint: Any) -> list[str]:
    """The values of a Literal, also where it stands beside None or in a tuple."""
    inner = [value for part in get_args(hint) for value in _literals(part)]
    return (
        [str(v) for v in get_args(hint)] if getattr(hint, "__origin__", None) is Literal else inner
    )
