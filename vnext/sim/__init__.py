"""The simulator: the engine without processes. The real reducer and scheduler, several ranks, and faults from one seed.

Pure like the scheduler, and never imported by the engine. Owns a toy model, a shadow cache, laws over two states,
and shrinking.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sim`, `python scripts/fuzz.py --seconds 60`.
"""
