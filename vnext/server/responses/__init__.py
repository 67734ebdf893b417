"""OpenAI's Responses API as a chat in another shape: bodies, their translation to a ChatBody, an answer's items, and the store of
answers. Decides nothing about tokens, and knows no HTTP.

Has met x86-64 Linux (AMD EPYC): `pytest tests/server/responses`.
"""
