"""Installs the switch of perf.recording_blocks in the engine core's process.

Python imports this module at start in every process that has this folder on its path."""

import sys

if any("vnext.runtime.engine.main" in word for word in sys.orig_argv):
    from perf.recording_blocks import install

    install()
