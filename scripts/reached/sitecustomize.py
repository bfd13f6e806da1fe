"""Imported by every process of a run under ``reached_lines.py``, when its interpreter starts."""

import os

if "PD_TEST_REACHED" in os.environ:
    import reached_lines

    reached_lines.install(os.environ["PD_TEST_REACHED"])
