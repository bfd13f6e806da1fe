"""Datasets: the requests of a run, drawn from a seed before we send anything."""
