"""Finds nodes through DNS, Kubernetes or a file, in addition to nodes given by URL."""
