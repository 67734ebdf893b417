"""GGUF: llama.cpp's file of a model, its metadata turned into the files of a checkpoint's folder.

Reads metadata and places of tensors, no weights: those are of vnext/models/loading.
Has met SmolLM2-135M-Instruct (Q4_1) on x86-64 Linux: `pytest tests/models/gguf`.
"""
