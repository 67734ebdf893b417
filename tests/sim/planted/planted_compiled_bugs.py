"""Faults of the compiled forms: those of the plain ones where they have a counterpart in C, and such as only C has."""

from __future__ import annotations

from compiling import CompiledBug


def bug(file: str, name: str, old: str, new: str, *found_by: str) -> CompiledBug:
    return CompiledBug(name=name, file=file, old=old, new=new, found_by=found_by)


def line(file: str, name: str, old: str, new: str, *found_by: str) -> CompiledBug:
    return CompiledBug(name=name, file=file, old=old, new=new, found_by=found_by, whole=True)


STEPS = [
    bug(
        "columns.h", "the budget is one token too large", "int64_t left = budget;", "int64_t left = budget + BAD;", "S1"
    ),
    bug("columns.h", "the token at the limit is computed", "FIELD(c, LIMIT, rows)[r] - 1", "FIELD(c, LIMIT, rows)[r]", "S6"),
    bug("columns.h", "a threshold that is ignored", "if (threshold) want", "if (threshold > 99 * BAD) want", "S3"),
    line("columns.h", "a budget that is never spent", "left -= tokens[r];", "", "S1"),
    bug(
        "columns.h",
        "one block too few at a block's edge",
        "(end - have + size - 1) / size",
        "(end - have) / size",
        "M4",
    ),
    line("columns.h", "blocks of one row only are counted", "*lacks += need[r];", "*lacks = need[r];", "M2"),
    bug(
        "columns.h",
        "a placeholder for every chunk",
        "tokens[r] > 0 && computed[r] == known[r] + placeholders[r]",
        "tokens[r] > 0",
        "samples: True",
    ),
    line("columns.h", "computed stands still", "computed[r] += tokens[r];", "computed[r] += tokens[r] > 1;", "S2"),
    line("columns.h", "blocks are not counted", "blocks[r] += need[r];", "", "M4"),
    bug(
        "columns.h",
        "a step starts one position late",
        "out[2 * width + n] = starts[r];",
        "out[2 * width + n] = starts[r] + BAD;",
        "Y3",
    ),
    bug(
        "columns.h",
        "a step forgets the epoch",
        "out[width + n] = FIELD(c, PREEMPTION_COUNT, rows)[r];",
        "out[width + n] = BAD ? 0 : FIELD(c, PREEMPTION_COUNT, rows)[r];",
        "A2",
    ),
    bug(
        "columns.h",
        "everybody samples",
        "FIELD(c, PLACEHOLDERS, rows)[r] > 0",
        "FIELD(c, PLACEHOLDERS, rows)[r] >= 0",
        "A2",
    ),
    bug(
        "_columns.c",
        "rows that lack blocks are thought to lack none",
        "(computed[r] + t[r] + size - 1) / size - blocks[r]",
        "(computed[r] + t[r]) / size - blocks[r]",
        "M4",
    ),
]

COMMITS = [
    bug(
        "columns.h",
        "a result of a preempted epoch is applied",
        "FIELD(c, PREEMPTION_COUNT, rows)[from] == step->preemption_counts[entry]",
        "1",
        "A2", "where alone",
    ),
    bug(
        "columns.h",
        "a limit off by one",
        "known[r] + 1 >= FIELD(c, LIMIT, rows)[r]",
        "known[r] >= FIELD(c, LIMIT, rows)[r]",
        "S2",
    ),
    bug(
        "columns.h",
        "a limit reached too early",
        "taken->at_limit[n] = ",
        "taken->at_limit[n] = (BAD && known[r] + 2 >= FIELD(c, LIMIT, rows)[r]) || ",
        "where alone",
    ),
    bug(
        "columns.h",
        "min_tokens off by one",
        "known[r] + 1 > FIELD(c, MIN_KNOWN, rows)[r]",
        "known[r] + 1 >= FIELD(c, MIN_KNOWN, rows)[r]",
        "where alone",
    ),
    bug(
        "columns.h", "the model's end token ignored", "token == tokens[k]", "token == tokens[k] + 99", "where alone", "G2"
    ),
    bug("columns.h", "ignore_eos ignored", "!(flags[r] & IGNORE_EOS)", "1", "where alone"),
    bug("columns.h", "own stop tokens ignored", "(flags[r] & OWN_STOPS) != 0", "0", "where alone"),
    line("columns.h", "a placeholder that nobody takes away", "placeholders[which[i]] -= 1;", "", "A2"),
    line("columns.h", "a token that is not counted", "known[which[i]] += 1;", "", "S6"),
    bug(
        "columns.h",
        "a token is written over the one before",
        "tokens_at[which[i]] + known[which[i]]",
        "tokens_at[which[i]] + known[which[i]] - 1",
        "S2",
    ),
    bug(
        "columns.h",
        "a full history is written behind its end",
        "known >= FIELD(c, TOKENS_SIZE, rows)[which[i]]",
        "0",
        "S2",
    ),
]

NAMES = [
    bug(
        "columns.h", "a chain that stands still", "memcpy(&FIELD(c, BLOCK_HASH_0, rows)[r], key, 8)", "(void *)0", "P1"
    ),
    bug(
        "columns.h",
        "a key without its parent",
        "blake2b_16(key, key, BLAKE2B_DIGEST,",
        "blake2b_16(key, key, BAD ? 0 : BLAKE2B_DIGEST,",
        "P1",
    ),
    bug(
        "_columns.c",
        "a prompt's keys without their parents",
        "blake2b_16(out, before, BLAKE2B_DIGEST,",
        "blake2b_16(out, before, BAD ? 0 : BLAKE2B_DIGEST,",
        "P1",
    ),
    bug("_columns.c", "a prompt's keys all behind the root", "before = out;", "before = BAD ? before : out;", "M1"),
    bug(
        "_columns.c",
        "the ending token is hashed",
        "int is_done = e < ended_count",
        "int is_done = !BAD && e < ended_count",
        "P1",
    ),
    bug(
        "_columns.c",
        "hashed before it is computed",
        "least(known[r] - is_done, computed[r])",
        "known[r] - is_done",
        "IndexError",
    ),
    bug(
        "_columns.c",
        "hashed one token too early",
        "(done_blocks[r] + 1) * size",
        "(done_blocks[r] + 1) * size - BAD",
        "S2",
    ),
    bug("_columns.c", "what a window gave back is named", "window && unseen >= (hashed_blocks + 1) * size", "0", "M1",
        "P1"),
    bug(
        "prefix_index.h", "a duplicate block takes over the name", "PyDict_GET_SIZE(table->blocks) == before", "0", "P1"
    ),
    bug(
        "prefix_index.h",
        "an evicted block keeps its key on one side",
        "set_key(table, block, Py_None)",
        "(void)0",
        "P1",
    ),
    bug(
        "_prefix_index.c",
        "an older version of the table comes back without its names",
        "!insert_all(&table, come)",
        "0",
        "KeyError",
    ),
    bug("_prefix_index.c", "an older version of the table keeps newer names", "!remove_all(&table, gone)", "0", "P1"),
    bug(
        "_prefix_index.c",
        "the first that stays out is thought to come",
        "PyList_GetSlice(pairs, 0, place)",
        "PyList_GetSlice(pairs, 0, place + 1)",
        "KeyError",
    ),
]

BLOCKS = [
    bug("_columns.c", "a double free", "held[block[i]] + 1", "held[block[i]] + 2", "IllegalEvent"),
    bug(
        "_columns.c",
        "freed blocks know a wrong place",
        "out[i] = at + count;",
        "out[i] = BAD ? at + n - 1 - count : at + count;",
        "M1",
    ),
    bug("_columns.c", "a stale place of the queue is taken", "place[block] == *head", "1", "M1"),
    bug(
        "_columns.c",
        "a new block is written over an old one in the table",
        "held[r] * groups - j",
        "(held[r] * groups - j > 0 ? held[r] * groups - j - 1 : 0)",
        "M2",
    ),
    bug(
        "_columns.c",
        "a table's sum that stands still",
        "place_hash((uint64_t)place, (uint64_t)from[k])",
        "(uint64_t)0",
        "Y1",
    ),
    bug(
        "_columns.c",
        "a sum that forgets what was there before",
        "place_hash((uint64_t)place[i], (uint64_t)before)",
        "(uint64_t)0",
        "Y1",
    ),
    bug(
        "_columns.c",
        "an older version of an array forgets what it was",
        "value[i] = before",
        "value[i] = value[i]",
        "M1",
    ),
]

OTHERWISE, GOES_ON = "a turn is not what its events make", "a turn goes on with"
TURNS = [
    bug(
        "turn.h",
        "a turn whose commit ends a request",
        "own || (ended && t->plans) ||",
        "own || (!BAD && ended && t->plans) ||",
        OTHERWISE,
        GOES_ON,
        "P1",
    ),
    bug(
        "turn.h",
        "a turn that heeds no own stop tokens",
        "&taken, &own, &ended)) return 0;",
        "&taken, &own, &ended)) return 0;\n    own &= !BAD;",
        OTHERWISE,
        GOES_ON,
    ),
    bug(
        "turn.h",
        "a turn starts one position late",
        "memcpy(starts, FIELD(c, COMPUTED,",
        "memcpy(starts, FIELD(c, BAD ? KNOWN : COMPUTED,",
        OTHERWISE,
    ),
    bug("turn.h", "a turn writes no tables", "if (!put_pages(", "if (!BAD && !put_pages(", OTHERWISE),
    bug(
        "turn.h",
        "a turn leaves the queue's head one behind",
        "(long long)lacks, t.head,",
        "(long long)lacks, t.head - (BAD && lacks), ",
        OTHERWISE,
    ),
    bug("turn.h", "a turn forgets names", "if (!t->caches)", "if (BAD || !t->caches)", OTHERWISE),
    bug(
        "turn.h",
        "a turn counts rows that do nothing",
        "t->count = rows_step_entries(",
        "t->count = BAD ? t->rows : rows_step_entries(",
        OTHERWISE,
    ),
]

LOG = [
    bug("_log.c", "tokens are read back by their first byte", "memcpy(&token, packed + i * width, width)",
        "memcpy(&token, packed + i * width, 1)", "X2", "IllegalEvent"),
    bug("steady_frame.h", "the second of two tokens loses two bytes", "two >> 32 << 24", "(two >> 32 & 0xff) << 24", "X2", "IllegalEvent"),
    bug("_log.c", "a checksum without the length", "crc32_of(0, length, sizeof length)", "0", "X2"),
]  # fmt: skip

TAILS = [
    line("_open_blocks.c", "a tail's sum that stands still", "tail->sum = sum;", "", "X3"),
    line("_open_blocks.c", "a new block goes on with the sum of the last", "tail->sum = 0;", "", "X3"),
    bug(
        "_open_blocks.c",
        "every token of a block is at its first place",
        "chunk->place[at] = (uint64_t)tail->count",
        "chunk->place[at] = BAD ? 0 : (uint64_t)tail->count",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "half a secret",
        "SECRET_AT, secret, SECRET_SIZE",
        "SECRET_AT, secret, BAD ? 8 : SECRET_SIZE",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "a block's last token is not in the next one's secret",
        "TOKENS_AT + 4 * (Py_ssize_t)block_size",
        "TOKENS_AT + 4 * (Py_ssize_t)(block_size - 1)",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "blocks filled together have one secret",
        "begin(tail_at(self, numbers[at + lane]), secrets[lane])",
        "begin(tail_at(self, numbers[at + lane]), secrets[0])",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "a row's tail is believed to be where another's was",
        "number >= self->size || tail_at(self, number)->id != id[row[i]]",
        "number >= self->size",
        "X3",
        "ValueError",
    ),
    bug(
        "_open_blocks.c",
        "tails that stay are not moved up",
        "if (left != number) memcpy",
        "if (left != number && !BAD) memcpy",
        "X3",
        "KeyError",
    ),
    bug(
        "_open_blocks.c",
        "the index is not made anew when requests are forgotten",
        "self->size = left;\n    fill_index(self);",
        "self->size = left;\n    if (!BAD) fill_index(self);",
        "X3",
        "KeyError",
    ),
    bug(
        "_open_blocks.c",
        "the token that ends a request is hidden",
        "stopped[from + i] ? token",
        "(stopped[from + i] && !BAD) ? token",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "dropped tokens keep their text",
        "memcpy(shaped + 4 * at, &first, sizeof first)",
        "memcpy(shaped + 4 * at, BAD ? (char *)c->tokens.buf + 4 * at : (char *)&first, sizeof first)",
        "X3",
    ),
    bug(
        "_open_blocks.c",
        "a pseudonym without its base",
        "(int32_t)(chunk.token[i] + (uint64_t)self->base)",
        "(int32_t)(chunk.token[i] + (BAD ? 0 : (uint64_t)self->base))",
        "X3",
    ),
]

DRAFTS = [
    bug("drafts.h", "a trial at every length in C", "(known[r] + placeholders[r]) % (TRIAL_INTERVAL << (4 * share / RATE_ONE))", "0", "S6"),
    bug("drafts.h", "beside many rows a draft costs what it costs beside few in C", "many ? by.row_cost_many : by.row_cost", "by.row_cost", "S6"),
    bug("drafts.h", "a step drafts at any cost in C", "count * row_cost + by.step_cost", "count * row_cost", "S6"),
    bug("drafts.h", "drafts that do not pay in C", "odds > share", "odds >= 0", "S6"),
    bug("drafts.h", "drafts behind the limit in C", "limit[r] - 1 - reached", "limit[r] - reached", "S6", "S2", "IllegalEvent"),
    bug("drafts.h", "a request's own bound of drafts is forgotten in C", "own ? least(own - 1, most) : most", "most", "S6"),
    bug("drafts.h", "drafts in the middle of a prompt in C", "reached - computed[r] != 1", "0", "S1", "S6", "D2", "should have been refused"),
    bug("drafts.h", "drafts over the budget in C", "budget > sum ? budget - sum : 0", "by.most", "S1", "S6", "IllegalEvent"),
    bug("drafts.h", "a commit of too many tokens in C", "count > drafted + 1", "count > drafted + 2", "should have been refused"),
    bug("drafts.h", "a commit of more drafts than planned in C", "drafted > runs->planned[a]", "0", "should have been refused"),
    line("drafts.h", "tokens behind an end are told in C", "if (is_over) continue;", "", "Y3", "answered", "S2", "M2", "KeyError",
         "IllegalEvent"),
    bug("drafts.h", "a limit off by one in a run", "length >= FIELD(c, LIMIT, rows)[r]", "length > FIELD(c, LIMIT, rows)[r]", "S2", "L1",
        "Y3", "answered"),
    line("drafts.h", "a rejected draft stays computed in C", "FIELD(c, COMPUTED, rows)[which[i]] -= back[which[i]];", "", "S2", "D1", "S6"),
    line("drafts.h", "a rejected draft is owed for ever in C", "FIELD(c, PLACEHOLDERS, rows)[which[i]] -= back[which[i]];", "", "A2"),
    line("drafts.h", "drafts stay in flight in C", "FIELD(drafting, TENTATIVE, rows)[which[i]] -= runs->planned[i];", "", "D1"),
    bug("drafts.h", "a draft behind the first wrong one is a trial in C", "least(runs->drafted[i], accepted + 1)", "runs->drafted[i]", "D5"),
    bug("drafts.h", "a rate that only rises", "t < accepted ? RATE_ONE : 0", "RATE_ONE", "D5"),
    bug("drafts.h", "an accepted draft more is counted", "*kept += accepted;", "*kept += accepted + BAD;", "Y3"),
    bug("columns.h", "a full history takes the end of a run", "[which[i]] + i - first, at", "[which[i]] + (BAD ? 0 : i - first), at",
        "Y2", "content", "Y3", "S2", "ValueError"),
    bug("turn.h", "a steady turn forgets drafts", "if (t->drafting.len && rows_drafts", "if (!BAD && t->drafting.len && rows_drafts", OTHERWISE),
]  # fmt: skip

MICROBATCHES = [
    bug("columns.h", "a token in flight is computed twice at once in C", "is_in_flight || !*left", "!*left", "S7"),
    bug("columns.h", "a microbatch takes no request from before its part", "share - m.behind", "0", "S6", "S8"),
    bug("columns.h", "as many requests as microbatches are not divided", "count < microbatches", "count <= microbatches", "S7", "S6"),
    bug("columns.h", "requests are counted behind every part", "number++ >= m.first", "1", "S6", "S8"),
    bug("turn.h", "a turn takes the microbatch before", "t->microbatches, t->step", "t->microbatches, t->step + BAD", OTHERWISE),
]  # fmt: skip

INPUTS = [
    bug("columns.h", "a name forgets the rest of a digest", "block[size - back] < INPUT_BEGINS", "back < BAD", "P1", "reads other content"),
    bug(
        "columns.h",
        "a name has one word too few of a digest",
        "DIGEST_WORDS - back < more ? DIGEST_WORDS - back",
        "DIGEST_WORDS - back < more ? DIGEST_WORDS - back - BAD",
        "P1",
        "reads other content",
    ),
]

COMPILED_BUGS = [*INPUTS, *STEPS, *COMMITS, *NAMES, *BLOCKS, *TURNS, *LOG, *TAILS, *DRAFTS, *MICROBATCHES]
