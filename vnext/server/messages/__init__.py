"""Anthropic's Messages API as a chat in another shape: bodies, their translation to a ChatBody, and an answer's blocks.

Has met x86-64 Linux (AMD EPYC): `pytest tests/server/messages`.
"""
