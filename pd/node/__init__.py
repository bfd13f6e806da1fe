"""The process of a node: message sockets, step loop, administration."""
