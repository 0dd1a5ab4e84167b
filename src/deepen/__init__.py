"""A network's depth is a program."""

__version__ = "0.1.0"
