"""``pd-launch`` in a forked process that finds packages along its PYTHONPATH."""

import os
import sys

from pd.cli import launch

sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
sys.exit(launch())
