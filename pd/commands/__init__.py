"""Commands of ``pd-launch``, one file each."""
