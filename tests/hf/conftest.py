"""Tests of `cosformer.hf` need Transformers; without it they are not collected."""

import importlib.util

collect_ignore_glob = []
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob.append("*.py")
else:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
