"""Configs from files and flags: nested frozen dataclasses, typed by their annotations."""

import dataclasses
import functools
import json
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from cosformer.check import check_choice

T = TypeVar("T")

TYPED_BY = "typed_by"
"""Key in the metadata of a mapping's field: the dataclass whose annotations its values follow."""


class Text(str):
    """A value as it was typed: what it means depends on the field that it is for."""


def load(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or from JSON, as runs keep theirs."""
    if not path.is_file():
        raise ValueError(f"config must be a file, got {path}")
    try:
        content = path.read_text(encoding="utf-8")
        found = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # of JSON, of TOML, or not UTF-8
        raise ValueError(f"config must be TOML or JSON, got {path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"config must hold named settings, got {type(found).__name__} in {path}")
    return found


def parse(settings: Iterable[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` as `{"a": {"b": "1"}, "c": "x"}`, the values as `Text`."""
    found: dict[str, Any] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        names = path.strip().split(".")
        if not equals or not all(names):
            raise ValueError(f"set must be a.b=value, as optimiser.lr=1e-3, got {setting!r}")
        inner = found
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ValueError(f"set must give {path} one value, got {setting!r} besides another")
        inner[names[-1]] = Text(value.strip())
    return found


def merge(config: T, given: Mapping[str, Any], where: str = "") -> T:
    """The config with these settings in place of its own; nested ones are merged as well."""
    changes = {
        name: _value(
            getattr(config, name, None), value, _slot(type(config), name, where), where + name
        )
        for name, value in given.items()
    }
    return _made(functools.partial(dataclasses.replace, cast(Any, config)), changes, where)


def build(kind: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """A config from settings alone."""
    fields = {
        name: _value(None, value, _slot(kind, name, where), where + name)
        for name, value in given.items()
    }
    for field in dataclasses.fields(cast(Any, kind)):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in fields:
            raise ValueError(f"{where}{field.name} must be given, got {', '.join(given) or 'none'}")
    return _made(kind, fields, where)


def plain(config: Any) -> Any:
    """Dicts, lists, numbers and strings: what JSON holds, and `build` takes."""
    if dataclasses.is_dataclass(config):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(name): plain(value) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Names of the settings in which two plain configs differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = where + "." if where else ""
        names = dict.fromkeys([*one, *other])
        return [d for n in names for d in differences(one.get(n), other.get(n), inner + n)]
    return [] if one == other else [where]


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """The value as the annotation wants it; an error that names the setting if it cannot be."""
    if annotation is Any:
        if isinstance(value, Mapping):
            return {name: coerce(each, Any, f"{where}.{name}") for name, each in value.items()}
        return _parsed(value)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must have settings of its own, got {value!r}")
        return build(annotation, value, where + ".")
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(annotation), where)
    if origin is Literal:
        if value not in get_args(annotation):
            known = ", ".join(map(str, get_args(annotation)))
            raise ValueError(f"{where} must be one of {known}, got {str(value)!r}")
        return str(value)
    if annotation in (str, Path):
        if not isinstance(value, str | Path):
            raise ValueError(f"{where} must be text, got {value!r}")
        if annotation is Path and value == "":  # which would be the folder that one is in
            raise ValueError(f"{where} must be a path, got ''")
        return annotation(value)
    return _plain_type(_parsed(value), annotation, where)


def _plain_type(value: Any, annotation: Any, where: str) -> Any:
    origin = get_origin(annotation) or annotation
    if origin is tuple or origin in (Sequence, list):
        inner = [each for each in get_args(annotation) if each is not Ellipsis]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, got {value!r}")
        fixed = origin is tuple and Ellipsis not in get_args(annotation)
        if fixed and len(value) != len(inner):
            raise ValueError(f"{where} must have {len(inner)} values, got {list(value)}")
        kinds = inner if fixed else [inner[0]] * len(value)
        return tuple(coerce(v, k, where) for v, k in zip(value, kinds, strict=True))
    if origin in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must have settings of its own, got {value!r}")
        return {name: coerce(each, Any, f"{where}.{name}") for name, each in value.items()}
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, annotation) or (annotation is int and isinstance(value, bool)):
        raise ValueError(f"{where} must be {names.get(annotation, annotation)}, got {value!r}")
    return value


def _made(make: Callable[..., T], fields: Mapping[str, Any], where: str) -> T:
    """The config; what it says against a field of its own names the setting by its whole path."""
    try:
        return make(**fields)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


class Slot(NamedTuple):
    """What a field takes."""

    annotation: Any
    typed_by: Any
    """For a mapping: the dataclass whose fields its values are."""


def _slot(kind: Any, name: str, where: str) -> Slot:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if name not in fields:
        check_choice(f"setting of {where[:-1]}" if where else "setting", name, fields)
    return Slot(get_type_hints(kind)[name], fields[name].metadata.get(TYPED_BY))


def _value(old: Any, value: Any, slot: Slot, path: str) -> Any:
    """What a field holds after `value` was given for it."""
    if isinstance(value, Mapping) and dataclasses.is_dataclass(old):
        return merge(old, value, path + ".")
    before = dict(old) if isinstance(old, Mapping) else {}
    if isinstance(value, Mapping) and slot.typed_by is not None:
        slots = {name: _slot(slot.typed_by, name, path + ".") for name in value}
        return before | {
            name: _value(before.get(name), value[name], slots[name], f"{path}.{name}")
            for name in value
        }
    found = coerce(value, slot.annotation, path)
    return _united(before, found) if isinstance(found, dict) else found


def _united(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings in one, in which the new one wins; mappings inside are united as well."""
    inner = {
        name: _united(old[name], value)
        for name, value in new.items()
        if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)
    }
    return {**old, **new, **inner}


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if type(None) in kinds and (value is None or value == "none"):
        return None
    errors = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return coerce(value, kind, where)
            except ValueError as error:
                errors.append(str(error))
    raise ValueError("; or ".join(errors))


def _parsed(value: Any) -> Any:
    """What was typed as TOML reads it; what TOML cannot read is text."""
    if not isinstance(value, Text):
        return value
    if value == "none":
        return None
    try:
        found = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return str(value)
    return found["value"] if len(found) == 1 else str(value)
