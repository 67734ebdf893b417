"""The runtime: every effect of the engine (processes, channels, devices) around the pure core."""
