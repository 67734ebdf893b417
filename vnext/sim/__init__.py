"""What a simulated engine is asked: a toy model's ranks, a shadow cache, laws over two states, and how a failure shrinks.

Pure like the scheduler, and never imported by the engine. `vnext-replay` judges and shrinks logs with it; the simulator, which
plays clients, clocks and faults from one seed, is in tests/sim.
Has met x86-64 Linux (AMD EPYC): `pytest tests/sim`, `python scripts/fuzz.py --seconds 60`.
"""
