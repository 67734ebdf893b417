"""The edge: HTTP and SSE towards clients, messages towards the engine core, and the text in between.

Views only translate. Nothing here decides what a step computes.
"""
