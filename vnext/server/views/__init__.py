"""The views, one file each: chat, completions, tokens, operations, the welcome page, the log for a viewer.

Code that two views share belongs to `answers/`, `http/` or `context/`.
Has met x86-64 Linux (AMD EPYC) and OpenAI's client: `pytest tests/server/views tests/e2e/test_openai_client.py`.
"""
