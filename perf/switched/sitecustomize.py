"""Python imports this at its start where this folder is on its path, in each process of a server: the switch of
perf.recording_blocks is put into the engine core's."""

import sys

if any("vnext.runtime.core_main" in word for word in sys.orig_argv):
    from perf.recording_blocks import install

    install()
