"""Ollama's API in vnext's terms: its bodies, and the chats and completions that ask for the same. The views show the answers.

Has met x86-64 Linux (AMD EPYC) and the package ollama 0.6.3: `pytest tests/server/views/test_ollama.py`.
"""
