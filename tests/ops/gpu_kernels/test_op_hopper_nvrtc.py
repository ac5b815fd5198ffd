"""Compiling and keeping kernels, with a driver and a compiler that are stubs."""

import hashlib
import os
import stat

import pytest
import torch

from cosformer.ops.hopper import cache, nvrtc

MACHINE_CODE = b"\x7fELF machine code"


class Library:
    """In place of the driver and of NVRTC: `broken` names calls that fail, `log` is an error's."""

    def __init__(self):
        self.version, self.broken, self.log = (12, 8), {}, b""
        self.made, self.loads, self.attributes = [], [], []

    def __getattr__(self, name):
        answer = getattr(type(self), f"on_{name}", lambda *given: 0)
        return lambda *given: self.broken.get(name) or answer(self, *given) or 0

    def on_nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version

    def on_nvrtcCompileProgram(self, program, count, options):
        self.made.append([options[n] for n in range(count)])
        return 6 if self.log else 0

    def on_nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(MACHINE_CODE)

    def on_nvrtcGetCUBIN(self, program, buffer):
        buffer.raw = MACHINE_CODE

    def on_nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1

    def on_nvrtcGetProgramLog(self, program, buffer):
        buffer.value = self.log

    def on_cuModuleLoadData(self, module, code):
        self.loads.append(code)
        return 0 if code == MACHINE_CODE else 200

    def on_cuMemcpyDtoH_v2(self, wanted, place, size):
        wanted._obj.value = 4096

    def on_cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))

    def on_cuGetErrorString(self, code, text):
        text._obj.value = b"something is wrong"


@pytest.fixture
def stubs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver, compiler = Library(), Library()
    monkeypatch.setattr(nvrtc, "libraries", lambda: (driver, compiler))
    return driver, compiler


def kept(tmp_path):
    return list(tmp_path.glob("cosformer/*"))


def test_code_is_compiled_once_and_read_from_the_cache_afterwards(stubs, tmp_path):
    _, compiler = stubs
    first, again = (nvrtc.cubin("source", ("-DR=2",)) for _ in range(2))
    assert first.binary == again.binary == MACHINE_CODE
    assert (first.stored, again.stored) == (False, True)
    assert compiler.made == [[b"--gpu-architecture=sm_90a", b"--std=c++17", b"-DR=2"]]
    (path,) = kept(tmp_path)  # and nothing half written
    assert path.suffix == ".cubin"


def test_source_flags_architecture_and_compiler_have_files_of_their_own(
    stubs, tmp_path, monkeypatch
):
    _, compiler = stubs
    nvrtc.cubin("source", ())
    nvrtc.cubin("other source", ())
    nvrtc.cubin("source", ("-DR=2",))
    compiler.version = (12, 9)
    nvrtc.cubin("source", ())
    monkeypatch.setattr(nvrtc, "OPTIONS", ("--gpu-architecture=sm_100a",))
    nvrtc.cubin("source", ())
    assert len(compiler.made) == len(kept(tmp_path)) == 5


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, "half"])
def test_a_damaged_file_is_compiled_again(stubs, tmp_path, damage):
    _, compiler = stubs
    nvrtc.cubin("source", ())
    (path,) = kept(tmp_path)
    path.write_bytes(path.read_bytes()[:-3] if damage == "half" else damage)
    code = nvrtc.cubin("source", ())
    assert (code.binary, code.stored, len(compiler.made)) == (MACHINE_CODE, False, 2)
    assert nvrtc.cubin("source", ()).stored


def test_code_of_the_cache_that_the_driver_refuses_is_compiled_again(stubs, tmp_path):
    driver, _ = stubs
    nvrtc.cubin("source", ())
    (path,) = kept(tmp_path)
    alien = b"code of another driver"
    path.write_bytes(hashlib.sha256(alien).digest() + alien)
    kernel = nvrtc.Kernel(nvrtc.cubin("source", ()), "sweep", 0, shared="bytes")
    assert driver.loads == [alien, MACHINE_CODE]
    assert kernel.shared == 4096
    assert driver.attributes == [(8, 4096)]
    assert path.read_bytes().endswith(MACHINE_CODE)


@pytest.mark.parametrize("obstacle", ["a file in its place", "not writable"])
def test_without_a_cache_that_can_be_written_all_else_works(stubs, tmp_path, monkeypatch, obstacle):
    _, compiler = stubs
    if obstacle == "a file in its place":
        (tmp_path / "cosformer").write_text("")
    else:

        def refuse(*args, **kwargs):
            raise PermissionError

        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    for count in (1, 2):
        assert nvrtc.cubin("source", ()).binary == MACHINE_CODE
        assert len(compiler.made) == count


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_cache_is_closed_to_other_users(stubs, tmp_path):
    mask = os.umask(0)
    try:
        nvrtc.cubin("source", ())
    finally:
        os.umask(mask)
    (path,) = kept(tmp_path)
    assert (mode_of(path.parent), mode_of(path)) == (0o700, 0o600)


@pytest.mark.parametrize("what", ["the folder", "the file"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_code_that_others_may_have_written_is_compiled_again(stubs, tmp_path, what, mode):
    _, compiler = stubs
    nvrtc.cubin("source", ())
    (path,) = kept(tmp_path)
    (path if what == "the file" else path.parent).chmod(mode)
    code = nvrtc.cubin("source", ())
    assert (code.stored, len(compiler.made)) == (False, 2)
    assert nvrtc.cubin("source", ()).stored  # the new file, in a folder that is closed again


def test_code_of_another_user_is_compiled_again(stubs, tmp_path, monkeypatch):
    _, compiler = stubs
    nvrtc.cubin("source", ())
    me = os.getuid()
    monkeypatch.setattr(cache.os, "getuid", lambda: me + 1)
    for count in (2, 3):
        code = nvrtc.cubin("source", ())
        assert (code.binary, code.stored, len(compiler.made)) == (MACHINE_CODE, False, count)


def test_unfinished_files_have_names_that_nobody_can_predict(stubs, tmp_path, monkeypatch):
    names = []
    replace = nvrtc.Path.replace
    monkeypatch.setattr(
        nvrtc.Path, "replace", lambda part, path: (names.append(part.name), replace(part, path))[1]
    )
    for _ in range(3):
        nvrtc.cubin("source", ())
        (path,) = kept(tmp_path)
        path.unlink()
    assert len(set(names)) == 3


def test_an_error_of_the_compiler_has_its_log(stubs):
    _, compiler = stubs
    compiler.log = b"line 3: no such thing"
    with pytest.raises(RuntimeError, match=r"could not compile .*: line 3: no such thing$"):
        nvrtc.cubin("source", ())


@pytest.mark.parametrize("name", ["nvrtcGetCUBIN", "cuDeviceGet", "cuFuncSetAttribute"])
def test_every_call_of_the_compiler_and_the_driver_is_checked(stubs, name):
    driver, compiler = stubs
    driver.broken[name] = compiler.broken[name] = 5

    def load():
        nvrtc.Kernel(nvrtc.cubin("source", ()), "sweep", 0, shared="bytes")

    of = "NVRTC" if name.startswith("nvrtc") else "the CUDA driver: something is wrong"
    with pytest.raises(RuntimeError, match=f"{name} failed with error 5 of {of}"):
        load()


def test_a_launch_that_fails_is_an_error_and_one_without_a_context_is_tried_again(
    stubs, monkeypatch
):
    codes = [nvrtc.NO_CONTEXT, 0, 719]
    monkeypatch.setattr(nvrtc, "driver_launch", lambda: lambda *args: codes.pop(0))
    monkeypatch.setattr(nvrtc.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        nvrtc.torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False
    )
    kernel = nvrtc.Kernel(nvrtc.cubin("source", ()), "sweep", 0)
    launch = nvrtc.Launch(kernel, (1, 1), 32, 0, 2, b"tail")
    x = torch.zeros(1)
    launch(x, None)
    assert codes == [719]
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with error 719"):
        launch(x, None)
