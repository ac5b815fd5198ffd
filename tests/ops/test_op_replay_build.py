"""When `host.cpp` is compiled, and what happens without a build."""

import pytest
import torch

from cosformer import attention, cli
from cosformer.ops.replay import native, replay


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("COSFORMER_NATIVE", raising=False)
    native.loaded.cache_clear()
    yield tmp_path / "cosformer"
    native.loaded.cache_clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that writes its arguments where a build goes."""
    program = tmp_path / "compiler"
    program.write_text(
        '#!/bin/sh\nall="$*"; while [ "$1" != -o ]; do shift; done; echo "$all" > "$2"\n'
    )
    program.chmod(0o755)
    return str(program)


def test_a_build_is_made_once_and_complete(compiler, cache, monkeypatch):
    path = native.build(compiler)
    assert list(cache.iterdir()) == [path]
    assert "host.cpp" in path.read_text()
    monkeypatch.setattr(native.subprocess, "run", None)
    assert native.build(compiler) == path


def test_another_torch_or_source_has_a_build_of_its_own(compiler, monkeypatch, tmp_path):
    first = native.build(compiler)
    monkeypatch.setattr(torch, "__version__", "2.99")
    second = native.build(compiler)
    source = tmp_path / "host.cpp"
    source.write_text("int other;")
    monkeypatch.setattr(native, "SOURCE", source)
    assert len({first, second, native.build(compiler)}) == 3


def test_the_verb_says_where_the_build_lies(compiler, capsys):
    assert cli.main(["build", "--compiler", compiler]) == 0
    assert capsys.readouterr().out == f"{native.build()}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [("no-such-compiler", "compiler must be a program"), ("false", "false could not compile")],
)
def test_without_a_compiler_that_works_there_is_an_error(name, message, cache):
    with pytest.raises(ValueError, match=message):
        native.build(name)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_build_that_does_not_load_is_left_alone(compiler):
    native.build(compiler)  # text, which no loader takes
    assert native.loaded() is None


@pytest.mark.parametrize("what", ["the folder", "the file"])
def test_a_build_that_others_may_have_written_is_ignored_with_a_warning(
    compiler, monkeypatch, what
):
    path = native.build(compiler)
    monkeypatch.setattr(native, "_import", None)
    (path if what == "the file" else path.parent).chmod(0o777)
    with pytest.warns(UserWarning, match=rf"{path.parent}.* must belong to .*, got user .*0777"):
        assert native.loaded() is None
    native.build(compiler)
    assert native.cache.refusal(path) is None


def test_calls_on_a_cpu_do_not_look_for_a_build(monkeypatch):
    def called():
        raise AssertionError

    monkeypatch.setattr(native, "_path", called)
    attention(*torch.randn(3, 1, 2, 8, 4))


def test_compiled_calls_do_not_look_for_a_build(monkeypatch):
    def called(q):
        raise AssertionError

    monkeypatch.setattr(replay, "loaded_for", called)
    torch.compile(lambda *x: attention(*x), backend="eager", fullgraph=True)(
        *torch.randn(3, 1, 2, 8, 4)
    )
