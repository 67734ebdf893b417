"""The version: the one place where it is written. setup.py reads it as text, so nothing is imported here."""

__version__ = "0.1.0"
