"""Tests of `cosformer.hf` need Transformers; without it they are not collected."""

import importlib.util

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["*.py"]  # no list otherwise: it would replace that of tests/conftest.py
else:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
