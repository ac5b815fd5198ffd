"""Small models with their tokenizers in folders, as `cosformer.conversion` takes them."""

import importlib.util

import pytest

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["*.py"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`bert` and `gpt2`: an encoder and a decoder of three layers."""
    from pretrained import save_small

    made = tmp_path_factory.mktemp("models")
    for kind in ("bert", "gpt2"):
        save_small(made / kind, kind)
    return made
