"""Fields: the data that a state keeps of each running request, one line of the rows' matrix (rows.py) for each field.

Owns their order and names. `columns.h` has the same list; a test compares them.
"""

from __future__ import annotations

# Decisions depend on these fields, and the digest reads them. TABLE_HASH is a hash of the block table (array_hash).
(
    ID,
    KNOWN,
    COMPUTED,
    PLACEHOLDERS,
    LIMIT,
    BLOCKS,
    HASHED_BLOCKS,
    PROMPT,
    PREEMPTION_COUNT,
    PRIORITY,
    FLAGS,
    MIN_KNOWN,
    CACHED,
    TABLE_HASH,
) = range(14)
STRUCTURE_FIELD_COUNT = 14
# Storage locations and block hashes. They differ in a redacted log.
TOKENS_AT, TOKENS_SIZE, TABLE_AT, TABLE_SIZE, BLOCK_HASH_0, BLOCK_HASH_1 = range(14, 20)
FIELD_COUNT = 20

# A second matrix in an engine that speculates: drafts in flight, and how often the request's drafts were kept of late.
TENTATIVE, RATE = range(2)
DRAFTING_FIELD_COUNT = 2
RATE_ONE = 1 << 10
RATE_MEMORY = 8
"""The weight of the past in RATE: a trial counts one part in eight."""
TRIAL_INTERVAL = 32
FEW_ROWS = 8
"""Up to so many rows one more costs a step `row_cost`, beyond them `row_cost_many` (Speculation)."""
"""A request whose drafts do not pay tries one whenever its length is a multiple of this, or of up to eight times this."""
NEW_ROW = (0, RATE_ONE * 3 // 4)
"""What a row that joins starts with."""

# A second or third matrix in an engine with recurrent layers (recurrent.py): the page that the request's steps write, that of its
# newest snapshot and the tokens in it, the page for the next one and the tokens that a planned step leaves in it (0: none does).
LIVE, NEWEST, NEWEST_EDGE, SPARE, DUE = range(5)
RECURRENT_FIELD_COUNT = 5

IGNORE_EOS = 1
OWN_STOPS = 2
DIGEST_WORDS = 4
"""Tokens that spell the digest of an input (inputs.py)."""
INPUT_BEGINS = -(2**30)
"""A token below is the first of an input."""
DRAFTS_SHIFT = 8
"""FLAGS from this bit on: one more than the most drafts that the request wants in a step; 0 leaves that to the engine."""

FIELD_NAMES = (
    "id known computed placeholders limit blocks hashed_blocks prompt preemption_count priority flags min_known cached table_hash "
    "tokens_at tokens_size table_at table_size block_hash_0 block_hash_1"
).split()
STORED_FIELD_NAMES = (
    "id known computed pending limit blocks sealed prompt epoch priority flags min_known cached table_sum "
    "tokens_at tokens_size table_at table_size chain_0 chain_1"
).split()
"""The names of the fields in logs and JSON answers, unchanged since the first version."""
