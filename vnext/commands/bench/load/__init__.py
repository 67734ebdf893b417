"""The HTTP client and the load generator of vnext-bench, `vnext chat`, perf/, scripts/ and tests/.

What lives here: reading of server-sent events, an asynchronous and a blocking client, arrival processes, and the sending of
requests with the times of each chunk. Figures do not: they are made from what comes out of here.
Has met x86-64 Linux (AMD EPYC): `pytest tests/commands/bench/load`.
"""
