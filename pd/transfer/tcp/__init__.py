"""The backend that works everywhere: frames over plain TCP sockets."""
