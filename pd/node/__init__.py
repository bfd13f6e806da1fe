"""The process of a node: message sockets, main loop, administration."""
