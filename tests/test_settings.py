"""Settings from files and flags: they reach their field with its type, or an error names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from cosformer.config import TYPED_BY, build, differences, load, merge, parse, plain


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    shape: Literal["round", "flat"] = "round"
    limit: int | None = 3
    pair: tuple[int, int] = (1, 2)

    def __post_init__(self):
        if self.rate < 0:
            raise ValueError(f"rate must be at least 0, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    name: str
    where: Path = Path("here")
    is_on: bool = False
    inner: Inner = field(default_factory=Inner)
    extra: Inner | None = None
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict, metadata={TYPED_BY: Inner})


BASE = Outer("x", options={"a": 1, "b": {"c": 2}})

SETTINGS = {
    "name=7": {"name": "7"},
    "name=a=b": {"name": "a=b"},
    "where=/tmp/x": {"where": Path("/tmp/x")},
    "is_on=true": {"is_on": True},
    "inner.rate=2": {"inner": Inner(rate=2.0)},
    "inner.rate=1e-3": {"inner": Inner(rate=1e-3)},
    "inner.limit=none": {"inner": Inner(limit=None)},
    "inner.limit=10": {"inner": Inner(limit=10)},
    "inner.shape=flat": {"inner": Inner(shape="flat")},
    "inner.pair=[3, 4]": {"inner": Inner(pair=(3, 4))},
    "extra.limit=4": {"extra": Inner(limit=4)},
    "extra=none": {"extra": None},
    'names=["a", "b"]': {"names": ("a", "b")},
    "options.a=text": {"options": {"a": "text", "b": {"c": 2}}},
    "options.b.d=3": {"options": {"a": 1, "b": {"c": 2, "d": 3}}},
    "options.e.f=1.5": {"options": {"a": 1, "b": {"c": 2}, "e": {"f": 1.5}}},
    "options.n=[1, 2]": {"options": {"a": 1, "b": {"c": 2}, "n": [1, 2]}},
    "shape.rate=1": {"shape": {"rate": 1.0}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_reaches_its_field_with_its_type(setting):
    found = merge(BASE, parse([setting]))
    for name, value in SETTINGS[setting].items():
        assert getattr(found, name) == value
        assert type(getattr(found, name)) is type(value)


WRONG = {
    "nam=1": "setting must be one of name, where, .*, got 'nam'; did you mean 'name'",
    "inner.rat=1": "setting of inner must be one of rate, shape, limit, pair, got 'rat'; did you",
    "shape.rat=1": "setting of shape must be one of rate, .*, got 'rat'",
    "shape.rate=x": "shape.rate must be a number, got 'x'",
    "inner.rate=fast": "inner.rate must be a number, got 'fast'",
    "inner.rate=-1": "^inner.rate must be at least 0, got -1",
    "extra.rate=-1": "^extra.rate must be at least 0, got -1",
    "inner.rate=true": "inner.rate must be a number, got True",
    "inner.limit=1.5": "inner.limit must be a whole number, got 1.5",
    "inner.limit=true": "inner.limit must be a whole number, got True",
    "inner.shape=square": "inner.shape must be one of round, flat, got 'square'",
    "inner.pair=[1]": "inner.pair must have 2 values",
    "inner.pair=1": "inner.pair must be a list, got 1",
    "inner=3": "inner must have settings of its own, got '3'",
    "options=3": "options must have settings of its own, got 3",
    "is_on=1": "is_on must be true or false, got 1",
    "name": "set must be a.b=value, as optimiser.lr=1e-3, got 'name'",
    "=3": "set must be a.b=value",
    "a..b=3": "set must be a.b=value",
    "inner=3 and inner.rate=1": "set must give inner.rate one value",
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_setting_is_named(setting):
    with pytest.raises(ValueError, match=WRONG[setting]):
        merge(BASE, parse(setting.split(" and ")))


def test_what_is_plain_builds_the_same_config_unless_a_needed_setting_is_missing():
    config = merge(BASE, parse(["inner.limit=none", "extra.rate=2", "shape.limit=5", "where=/a"]))
    assert build(Outer, plain(config)) == config
    with pytest.raises(ValueError, match="name must be given, got is_on"):
        build(Outer, {"is_on": True})


def test_differences_are_named_by_their_path():
    other = merge(BASE, parse(["inner.rate=2", "options.b=3", "extra.rate=1"]))
    assert differences(plain(BASE), plain(other)) == ["inner.rate", "extra", "options.b"]
    assert differences(plain(BASE), plain(BASE)) == []


FILES = {"a.toml": "name = 'y'\n[inner]\nlimit = 8\n"}
FILES["a.json"] = '{"name": "y", "inner": {"limit": 8}}'


@pytest.mark.parametrize("file", FILES)
def test_files_hold_settings(tmp_path, file):
    (tmp_path / file).write_text(FILES[file])
    found = merge(BASE, load(tmp_path / file))
    assert (found.name, found.inner, found.options) == ("y", Inner(limit=8), BASE.options)


@pytest.mark.parametrize("content", [b"name = ", b"\xff", b"[1, 2]", b"a = " + b"[" * 9_999])
def test_a_broken_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / ("a.json" if content == b"[1, 2]" else "a.toml")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config must .* got .*a\."):
        load(path)
    with pytest.raises(ValueError, match=r"config must be a file, got .*nowhere"):
        load(tmp_path / "nowhere.toml")
