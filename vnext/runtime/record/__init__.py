"""The log on disk: the recorder, segments, their compression, the times of frames, keys of redacted names.

No formats: bytes are made in `vnext/log`.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/record`.
"""
