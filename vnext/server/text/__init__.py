"""Texts: from a client's words to token ids and back, piece by piece. Shared by the HTTP edge and the library."""
