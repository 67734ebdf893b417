"""Ranks on other hosts: authenticated connections, the master's end and the agent that starts ranks on its host.

Not how ranks compute or what they are sent: both ends carry the ring's messages and the ranks' results as they are.
Has met x86-64 Linux (AMD EPYC), two loopback addresses of one machine: `pytest tests/hosts`. Has not met two machines.
"""
