"""The scrubber: a log as a local web page. app.py serves it; the other modules answer its questions.

The page computes nothing again: what it shows comes from `replay/reading`.
Has met x86-64 Linux (AMD EPYC) and Chromium: `pytest tests/replay/ui`.
"""
