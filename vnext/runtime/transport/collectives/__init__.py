"""How ranks add and join tensors: shared memory and gloo on a CPU, mapped memory and NCCL between GPUs.

No models and no batches. A sum has the same bits on every rank and in every form.
Has met x86-64 Linux (AMD EPYC): `pytest tests/runtime/transport`. Has not met two GPUs: `python -m perf.gpu_all_reduce`.
"""
