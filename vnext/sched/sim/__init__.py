"""The simulator: the engine without processes. The real reducer and scheduler, several ranks, faults from one seed.

Owns toy model, virtual clock, shadow cache, faults, the laws that need more than one state, and shrinking. Pure like the
rest of sched; the engine does not know it.
"""
