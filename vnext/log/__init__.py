"""The record: frames, snapshots, redaction, compression and timestamps as bytes. Pure, like the state that it holds.

No files, threads or sockets: `runtime/record` writes these bytes, and `replay/reading` opens them.
Has met x86-64 Linux (AMD EPYC) and every format written so far: `pytest tests/log tests/replay/test_old_logs.py`.
"""
