"""Routing: which of several engines a request goes to. Policies, what a router knows of each engine, and its decisions.

What reads or writes a socket does not belong here, nor what schedules inside an engine.
Has met an x86-64 machine with 2 cores: `scripts/test.sh tests/routing`. Has not met engines on several hosts: `vnext router`.
"""
