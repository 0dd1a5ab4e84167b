"""Settings for the whole suite: no network, no display, steady property tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Set before torch and transformers are imported, which happens in the test modules.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` gives the same verdict on the same code; the slow set looks at new examples each time. A deadline would
# measure the load of the machine.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("steady")
