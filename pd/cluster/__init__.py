"""Deployments over several hosts, from one YAML file.

A program of this package, the agent, runs on each host and starts the processes there. The
deployment talks to it over standard input and output, whatever the way to the host is: a process
here, a network namespace or ssh.
"""
