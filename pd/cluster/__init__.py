"""Deployments over several hosts: Ray places and supervises the processes of one YAML file. The
operator stays outside and speaks JSON, because whoever receives an object from Ray unpickles it."""
