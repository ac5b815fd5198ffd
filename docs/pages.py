"""What MkDocs cannot read by itself: pages of the root folder, the command line, doctests.

`mkdocs.yml` names this file twice: as a hook (the functions `on_…`) and as an extension of griffe,
which reads docstrings. Everything is read from source text: nothing here imports cosformer.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "NOTES.md": "notes.md",
    "README.md": "index.md",
}
"""File of the root folder -> its page of the site. README's page is docs/index.md."""
VERBS_MARK = "<!-- verbs -->"
"""Where the page about the command line gets its sections."""
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>(?!https?:)[^)#\s]+)(?P<rest>#[^)]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


class Docstrings(griffe.Extension):
    """Docstrings as markdown: a doctest is a block of code, a Sphinx role is a name in code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """A field without a docstring is described by the comment behind it."""
        for field in cls.members.values():
            if field.is_attribute and field.annotation and not field.docstring:
                line = field.lines[-1] if field.lines else ""
                if comment := re.search(r"  # (.+)$", line):
                    field.docstring = griffe.Docstring(comment[1], parent=field)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """A function that is named as its file: the public name means the function.

        `cosformer.ops.attention` is a file with a function `attention`. griffe takes the name for
        the file, as Python does before the package's own import.
        """
        public = [(room, name) for room in rooms(pkg) for name in room.exports or ()]
        for room, name in public:
            if room.members[name].is_alias:
                room.members[name].resolve_target()
        for room, name in public:
            member = room.members[name]
            if member.is_module and name in member.members:
                room.members[name] = griffe.Alias(name, member.members[name], parent=room)


def rooms(package: griffe.Module) -> list[griffe.Module]:
    """The package and all packages in it, the innermost first."""
    inner = [member for member in package.modules.values() if member.is_init_module]
    return [each for room in inner for each in rooms(room)] + [package]


def as_markdown(docstring: str) -> str:
    """The docstring with doctests in fences and ``:func:`name``` as a plain name.

    `eps, impl: as in attention` becomes a line for each argument, which then shows its default.
    """
    text = re.sub(r":(?:class|func|meth|mod|attr):`~?([^`]*)`", r"`\1`", docstring)
    text = re.sub(r"^    ((?:\w+, )+\w+): (as in .*)$", _a_line_each, text, flags=re.MULTILINE)
    parts = re.split(r"\n{2,}", text)
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.startswith(">>> ") else part for part in parts
    )


def _a_line_each(match: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that lie in the root folder, where people look for them on a code host."""
    for source, page in ROOT_PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the command line, and make links between folders links between pages."""
    path = page.file.src_uri
    sources = {target: source for source, target in ROOT_PAGES.items() if target != "index.md"}
    folder = posixpath.dirname(sources.get(path, f"docs/{path}"))
    if VERBS_MARK in markdown:
        markdown = markdown.replace(VERBS_MARK, command_line())
    parts = FENCED.split(markdown)  # code stays as it is
    parts[::2] = [relinked(part, folder, posixpath.dirname(path)) for part in parts[::2]]
    return "".join(parts)


def relinked(text: str, folder: str, page_folder: str) -> str:
    """Links of a file in `folder` of the repository as links of a page in `page_folder`.

    What has no page, such as source code, keeps its name and loses its link.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        if target in ROOT_PAGES:
            target = ROOT_PAGES[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return match["text"]
        path = posixpath.relpath(target, page_folder or ".")
        return f"[{match['text']}]({path}{match['rest'] or ''})"

    return LINK.sub(link, text)


def command_line() -> str:
    """A section for each verb: how it is typed, what it does, its flags."""
    package = griffe.load("cosformer", search_paths=[ROOT], submodules=True)
    verbs = ast.literal_eval(str(package["cli.VERBS"].value))
    sections = [
        section(verb, package[module.removeprefix("cosformer.")], line)
        for verb, (module, line) in verbs.items()
    ]
    return "\n\n".join(sections)


def section(verb: str, module: Any, line: str) -> str:
    options = module["Options"]
    positional = (
        ast.literal_eval(str(module["POSITIONAL"].value)) if "POSITIONAL" in module.members else ""
    )
    usage = f"cosformer {verb}"
    if positional:
        word = positional.upper()
        usage += f" {word}" if options[positional].value is None else f" [{word}]"
    rows = [flag(name, field, module) for name, field in fields(options).items()]
    table = ["| flag | value | default | meaning |", "|---|---|---|---|", *rows]
    about = f"{options.docstring.value}" if options.docstring else ""
    return "\n".join([f"## {verb}", "", f"{line}.", "", "```text", f"{usage} [options]", "```", "",
                      as_paragraphs(about), "", *table])  # fmt: skip


def as_paragraphs(text: str) -> str:
    """Lines that are commands are shown as code."""
    parts = (part.strip() for part in text.split("\n\n"))
    return "\n\n".join(
        f"```sh\n{part}\n```" if part.startswith("cosformer ") else part for part in parts
    )


def fields(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are declared, its own before those that it inherits."""
    return {
        name: member
        for name, member in {**options.members, **options.inherited_members}.items()
        if member.is_attribute and member.annotation and "property" not in member.labels
    }


def flag(name: str, field: Any, module: Any) -> str:
    kind = re.sub(r"\s*\|\s*None\b|\bNone\s*\|\s*", "", str(field.annotation))
    kind = re.sub(r"Literal\[([^]]*)\]", lambda m: m[1].replace("'", "").replace('"', ""), kind)
    kind = re.sub(r"tuple\[(.*), \.\.\.\]", r"\1 …", kind)
    kind = re.sub(r"tuple\[(.*), (.*)\]", r"\1 \2", kind)
    spelled = f"`--{name.replace('_', '-')}`"
    if kind == "bool":
        spelled += f", `--no-{name.replace('_', '-')}`"
    meaning = " ".join(field.docstring.value.split()) if field.docstring else ""
    cells = (spelled, f"`{kind}`", default(field, module), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def default(field: Any, module: Any) -> str:
    """The default as one would type it; a constant of the module by its value."""
    if field.value is None:
        return "required"
    text = str(field.value)
    if text in module.members and module.members[text].is_attribute:
        text = str(module.members[text].value)
    if text in ("None", "()"):
        return "–"
    path = re.fullmatch(r"Path\((.*)\)", text)
    shown = (path[1] if path else text).strip("'\"")
    return f"`{shown}`"
