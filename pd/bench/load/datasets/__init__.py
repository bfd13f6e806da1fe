"""Datasets: what the requests of a run ask, drawn from a seed before anything is sent."""
