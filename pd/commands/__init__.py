"""One file per command of ``pd-launch``."""
