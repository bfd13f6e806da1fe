"""Senders and receivers of one room, shared by backends."""
