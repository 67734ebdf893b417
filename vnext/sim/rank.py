"""A rank without a device: it folds every event, runs steps on a shadow cache and samples from the toy model.

The shadow cache stores, for each slot of each page, a digest of all tokens that led to it and its group of layers. A
step writes its slots first; then every position that a query of the step sees must hold its own digest. Corruption of
the real cache (a page shared, evicted or indexed wrongly) is therefore an error in the same step. So is a hash of two
contents, or a content with two hashes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from struct import Struct

import msgspec
import numpy as np
import xxhash

from vnext.sampling.constraint import Matcher
from vnext.sim.checks.plain_state import Divergence, PlainState, in_sight
from vnext.sim.drafts import drafts_behind
from vnext.sim.rank_values import BEHIND, Contents, StepResult, is_short_in, named_since, spoil
from vnext.sim.states import ShadowStates
from vnext.sim.story import CHAIN_FACTOR, CHAIN_MASK, Story, ids_of
from vnext.sim.toy import ToyVocabulary, constrained, nearest
from vnext.state.digest import digest
from vnext.state.events import (
    AnyEvent,
    BlocksHandedOver,
    BlocksPromoted,
    BlocksReceived,
    EnginePaused,
    EngineRecovered,
    EngineStarted,
    MemoryRanShort,
    PromotionEnded,
    RequestArrived,
    StepCommitted,
    WeightsChanged,
    first_of,
    plan_of,
)
from vnext.state.facilities.handover import handed_over, snapshot_of
from vnext.state.reduce import reduce, start
from vnext.state.state import State

GROUP_STEP = CHAIN_MASK + 1
STORIES_SPARE = 32
GARBAGE = -7
token_word = Struct("<i")


class Work(msgspec.Struct, frozen=True):
    """One scheduled request of a step: its table, its story, and the range [start, end) that it computes.

    `known` counts its tokens, including those that steps in flight sampled. `drafts` are computed behind `end`. `half`: the story
    of its other half, `behind` behind, whose first page is of the block in which it begins; None without guidance.
    """

    id: int
    preemption_count: int
    table: list[int]
    story: Story
    start: int
    end: int
    known: int
    samples: bool
    drafts: list[int]
    half: Story | None = None
    behind: int = 0

    @property
    def chains(self) -> list[int]:
        """The digests that the step's places hold when it has run: of the drafts too."""
        return self._with_drafts(self.story.chains, self.end)

    def content(self, is_half: bool) -> tuple[list[int], int]:
        """`chains` of a group, and by how many positions its slots are behind; [] where a request without guidance has no half."""
        half = self._with_drafts(self.half.chains, self.end - self.behind) if self.half else []
        return (half, self.behind) if is_half else (self.chains, 0)

    def _with_drafts(self, chains: list[int], end: int) -> list[int]:
        if not self.drafts:
            return chains
        chains = chains[:end]
        for token in self.drafts:
            chains.append((chains[-1] * CHAIN_FACTOR + token + 1) & CHAIN_MASK)
        return chains

    @property
    def last(self) -> int:
        """The end of all that the step computes."""
        return self.end + len(self.drafts)


class Sampled(msgspec.Struct, frozen=True):
    """What a step in flight has sampled, by (id, preemption_count), and as it should be committed."""

    tokens: dict[tuple[int, int], bytes]
    commit: StepCommitted


class Rank:
    """One replica of the engine. Mutable: give it every event once, in order. `cache` holds a chain for each slot."""

    def __init__(self, started: EngineStarted, contents: Contents | None = None) -> None:
        """`contents`: those of the disk tier."""
        config = started.config
        self._contents = contents or Contents()
        self.state: State = start(started)
        self._groups = config.group_count
        self._salts: dict[int, str] = {}
        self._weights = ""
        self._chain_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._vocabulary = ToyVocabulary(config.vocab_size, config.eos_token_ids)
        self._begin()

    def _begin(self) -> None:
        """Nothing has run yet: an empty cache, no step in flight."""
        config = self.state.config
        self.cache = [[0] * config.block_size for _ in range(config.page_count)]
        self._states = ShadowStates(config.state_pages)
        self._stories: dict[int, Story] = {}
        self._drop_steps()

    def _drop_steps(self) -> None:
        """No step is in flight."""
        self._matchers: dict[tuple[int, int], Matcher] = {}
        self._masks, self._failed = 0, list[int]()
        self._in_flight: deque[Sampled] = deque()

    def go_on_from(self, state: State, arrivals: Iterable[RequestArrived]) -> None:
        """Begin in a state that others have led to; `arrivals` are those of the requests that live in it."""
        self.state = state
        if (weights := state.weights) is not None:
            self._weights = weights.label
        for event in arrivals:
            self._arrived(event)

    def fold(self, event: AnyEvent, shared: PlainState | None = None, digests: bool = True) -> StepResult | None:
        """The result of a planned step, None for every other event. Divergence if the cache is wrong.

        `shared`: the state after the event, for a rank that shares its process with the engine core and folds nothing.
        `digests`: whether a result has this rank's digest.
        """
        if isinstance(event, StepCommitted):
            ours = self._in_flight.popleft().commit
            if (ours.tokens, ours.counts, ours.drafted) != (event.tokens, event.counts, event.drafted):
                raise Divergence(f"step {event.step} was committed with tokens that this rank did not sample")
        before, self.state = self.state, reduce(self.state, event) if shared is None else shared.state
        if isinstance(event, RequestArrived):
            self._arrived(event)
        if isinstance(event, EngineRecovered):
            self._begin()
        if isinstance(event, MemoryRanShort):
            self._drop_steps()
        self._forget(event)
        if isinstance(event, BlocksPromoted):
            self._expect(before)
        if isinstance(event, PromotionEnded):
            self._fill(before, event)
        if isinstance(event, BlocksHandedOver):
            self._hand_over(event)
        if (plan := plan_of(event)) is None:
            self._copy_out(before)
            return None
        is_short, seen = plan.step in self._contents.short, shared or PlainState(self.state)
        commit = spoil(self.cache, seen) if is_short else self._run(plan.step, seen)
        self._copy_out(before)
        word = digest(self.state) if digests and shared is None else 0
        return StepResult(commit, word, 0 if is_short else self._masks, () if is_short else tuple(self._failed), is_short)

    def _arrived(self, event: RequestArrived) -> None:
        self._salts[event.id] = f"{event.cache_salt} {event.sampling.adapter}" if event.sampling.adapter else event.cache_salt

    def _forget(self, event: AnyEvent) -> None:
        """Other weights compute other content of the same tokens; a rank that sleeps loses the content of all pages."""
        if isinstance(event, WeightsChanged):
            self._weights, self._stories = f"{event.version} {event.digest}", {}
        if isinstance(event, EnginePaused) and event.mode == "sleep":
            self.cache = [[0] * len(page) for page in self.cache]
            self._states = ShadowStates(self.state.config.state_pages)

    def _copy_out(self, before: State) -> None:
        """K1: when a block or a snapshot becomes complete, its content equals what the disk tier holds under its name.

        Where steps lack memory nothing is complete until they are over, and then what has a name still.
        """
        pool, was_short = self.state.pool, is_short_in(before, self._contents.short)
        if self.state.tier is None or is_short_in(self.state, self._contents.short):
            return
        for key, block in named_since(pool, before.pool, was_short):
            self._compare_stored(key, self.cache[block], f"block {block}")
        for key, page in named_since(pool.states, before.pool.states, was_short):
            self._compare_stored(key + BEHIND, self._states.content(page), f"state page {page}")

    def _compare_stored(self, key: bytes, content: list[int], what: str) -> None:
        if self._contents.blocks.setdefault(key, content.copy()) != content:
            raise Divergence(f"K1: {what} has a name that stands for another content on disk")

    def _expect(self, before: State) -> None:
        """Know what blocks contain that nobody here has computed: a run before this list of events, or another engine."""
        assert self.state.tier is not None, "a transfer has begun"
        transfer, blocks = self.state.tier.transfers[-1], self._contents.blocks
        for place, key in enumerate(transfer.keys[transfer.hits :], transfer.hits):
            blocks[key] = blocks.get(key) or self._as_before(before, transfer.request, place)
        if transfer.state >= 0:
            key, last = transfer.keys[-1] + BEHIND, len(transfer.keys) - 1
            blocks[key] = blocks.get(key) or self._as_before(before, transfer.request, last)[-1:]

    def _fill(self, before: State, event: PromotionEnded) -> None:
        """The blocks of a transfer come back."""
        assert before.tier is not None, "it has just ended"
        for transfer in before.tier.transfers:
            end = min(transfer.hits + event.count, len(transfer.pages)) if transfer.number == event.transfer else 0
            is_read = end and not isinstance(event, BlocksReceived)  # else it is not the disk's
            damaged = self._contents.found.setdefault(transfer, frozenset(self._contents.damaged)) if is_read else frozenset()
            for place in range(transfer.hits, end if transfer.keys else 0):
                key = transfer.keys[place]
                content = self._contents.blocks[key]
                self.cache[transfer.pages[place]] = [GARBAGE] * len(content) if key in damaged else content.copy()
            if end and transfer.state >= 0 and event.count == transfer.count and transfer.keys:
                key = transfer.keys[-1] + BEHIND
                self._states.fill(transfer.state, [GARBAGE] if key in damaged else self._contents.blocks[key])

    def _hand_over(self, event: BlocksHandedOver) -> None:
        """H1: what leaves under a name is what the disk tier has under it.

        It was copied when the block became complete. A rank hands nothing over while it lacks memory.
        """
        if is_short_in(self.state, self._contents.short):
            return
        names, pages = handed_over(self.state, event)
        for name, page in zip(names, pages, strict=True):
            if self._contents.blocks.get(name) != self.cache[page]:
                raise Divergence(f"H1: request {event.id} hands over page {page} under a name that stands for another content")
        page = snapshot_of(self.state, names)
        if page >= 0 and self._contents.blocks.get(names[-1] + BEHIND) != self._states.content(page):
            raise Divergence(f"H1: request {event.id} hands over a snapshot under a name that stands for another content")

    def _as_before(self, before: State, id_: int, block: int) -> list[int]:
        """What a run before this list of events has written of a request's block."""
        story, size = Story(self._salts[id_] + self._weights), len(self.cache[0])
        story.agree(next(entry.tokens for entry in before.waiting if entry.id == id_))
        return story.chains[block * size : block * size + size]

    def _run(self, step: int, seen: PlainState) -> StepCommitted:
        works, self._masks, self._failed = self._works(seen), 0, []
        for work in works:
            self._write(work)
        for work in works:
            self._read(work)
        tokens = {(work.id, work.preemption_count): self._sample(work) for work in works if work.samples}
        kept = [len(tokens.get((w.id, w.preemption_count), b"0000")) // 4 - 1 for w in works]
        self._states.run(self.state, [(seen.rows.id.index(w.id), w.chains, w.start, w.end + more) for w, more in zip(works, kept)])
        commit = StepCommitted(step=step, tokens=b"".join(tokens.values()))
        if any(work.drafts for work in works if work.samples):
            counts, drafted = bytes(len(each) // 4 for each in tokens.values()), bytes(len(w.drafts) for w in works if w.samples)
            commit = msgspec.structs.replace(commit, counts=counts, drafted=drafted)
        self._in_flight.append(Sampled(tokens, commit))
        self._forget_stories()
        return commit

    def _works(self, seen: PlainState) -> list[Work]:
        step, works = seen.in_flight[-1], []
        row_of = {id_: row for row, id_ in enumerate(seen.rows.id)}
        for id_, preemptions, first, count, samples, drafts in zip(
            step.ids, step.preemption_counts, step.starts, step.counts, step.samples, step.drafts
        ):
            row = row_of[id_]
            story, known = self._story(id_, preemptions, seen.histories[row])
            first = min(first, known - (count - drafts))  # planned as if all drafts in flight were kept
            end = first + count - drafts
            drafted = self._drafts(id_, preemptions, story, end, drafts)
            half = self._half(id_, story, known)
            work = Work(id_, preemptions, seen.tables[row], story, first, end, known, samples, drafted, *half)
            if seen.rows.hashed_blocks[row] and self.state.config.prefix_caching:
                self._compare_name(work, seen.rows.hashed_blocks[row])
            works.append(work)
        return works

    def _story(self, id_: int, preemptions: int, history: bytes) -> tuple[Story, int]:
        """A row's story and its known length, including tokens that its steps in flight sampled."""
        story = self._stories.get(id_)
        if story is None:
            story = self._stories[id_] = Story(self._salts[id_] + self._weights)
        for sampled in self._in_flight:
            history += sampled.tokens.get((id_, preemptions), b"")
        story.agree(history)
        return story, len(history) // 4

    def _half(self, id_: int, story: Story, known: int) -> tuple[Story | None, int]:
        """The story of a request's other half, and how many positions it is behind."""
        request = self.state.requests[id_]
        if (guidance := request.sampling.guidance) is None:
            return None, 0
        half = self._stories.setdefault(-1 - id_, Story("without" + self._salts[id_] + self._weights))
        half.agree(guidance.beside + story.data[4 * request.prompt_length : 4 * known])
        return half, request.prompt_length - len(guidance.beside) // 4

    def _is_half(self, group: int) -> bool:
        """Whether a group is one of other halves."""
        return self.state.config.guidance and group >= self._groups // 2

    def _pages(self, work: Work, group: int) -> list[int]:
        """The pages in which a group's content lies, in order."""
        first = work.behind // len(self.cache[0]) if self._is_half(group) else 0
        return work.table[group :: self._groups][first:]

    def _compare_name(self, work: Work, hashed_blocks: int) -> None:
        """P1: a hash has one content, and a content has one hash.

        Of the last block that the row has hashed.
        """
        for group in range(self._groups):
            self._compare_page(work, group, hashed_blocks)

    def _compare_page(self, work: Work, group: int, hashed_blocks: int) -> None:
        last = hashed_blocks * len(self.cache[0]) - 1
        block = work.table[(hashed_blocks - 1) * self._groups + group]
        key = self.state.pool.prefix_index.hash_of(block)
        if key is None or not in_sight(self.state.config, group, last, work.end):
            return  # a page that was given back may be another's by now
        chain = work.story.chains[last] + group * GROUP_STEP
        if self._chain_of.setdefault(key, chain) != chain or self._key_of.setdefault(chain, key) != key:
            raise Divergence(f"P1: block {block} has a name that stands for another content")

    def _write(self, work: Work) -> None:
        if work.end > work.known or work.samples != (work.end == work.known):
            raise Divergence(f"request {work.id} computes {work.end} of {work.known} tokens, samples: {work.samples}")
        size = len(self.cache[0])
        room = len(work.table) // self._groups * size
        if work.last > room:
            raise Divergence(f"request {work.id} computes {work.last} tokens and has room for {room}")
        for group in range(self._groups):
            pages, mark = self._pages(work, group), group * GROUP_STEP
            chains, behind = work.content(self._is_half(group))
            for place in range(max(work.start - behind, 0), work.last - behind) if chains else ():
                self.cache[pages[place // size]][place % size] = chains[place] + mark

    def _read(self, work: Work) -> None:
        if self.state.config.windows:
            return self._read_windows(work)
        found, right = [chain for block in work.table for chain in self.cache[block]], work.chains[: work.last]
        if found[: work.last] != right:
            at = next(place for place, chain in enumerate(right) if found[place] != chain)
            raise Divergence(f"request {work.id} reads other content at its position {at}")

    def _read_windows(self, work: Work) -> None:
        """Check everything that the step's queries see in each group's layers; a window ends at the query."""
        size = len(self.cache[0])
        windows = self.state.config.windows
        for group in range(self._groups):
            pages, mark, is_half = self._pages(work, group), group * GROUP_STEP, self._is_half(group)
            chains, behind = work.content(is_half)
            window = windows[group - self._groups // 2 * is_half]  # layers have one, whichever half they compute
            first, last = max(work.start - behind - window + 1, 0) if window else 0, max(work.last - behind, 0) if chains else 0
            found: list[int] = []
            for page in pages[first // size : -(-last // size)]:
                found += self.cache[page] if page >= 0 else [-1] * size  # a page that is none
            found = found[first % size : first % size + last - first]
            right = [chain + mark for chain in chains[first:last]]
            if found != right:
                place = first + next(at for at, chain in enumerate(right) if found[at] != chain)
                raise Divergence(f"request {work.id} reads other content at its position {place} in group {group}")

    def _sample(self, work: Work) -> bytes:
        """Greedy on the toy model (toy.py); the tokens are exactly [0, end): a sampling row has caught up.

        Behind each draft that is the token before it, one more, unless the constraint fails there: it does so again in the next
        step.
        """
        seed = self.state.requests[work.id].sampling.seed
        matcher = self._matcher(work.id, work.preemption_count, work.story, work.end)
        weight = work.story.weights[work.end]
        tokens, ahead = [self._choose(matcher, seed + weight)], None if matcher is None else matcher.copy()
        if matcher is not None and matcher.error:
            self._failed.append(work.id)
        for place, draft in enumerate(work.drafts, start=work.end + 1):
            if draft != tokens[-1]:
                self._require_wrong(work.id, ahead)
                break
            weight += place * draft
            if ahead is not None:
                ahead.take(draft)
            token = self._choose(ahead, seed + weight)
            if ahead is not None and ahead.error:
                break
            tokens.append(token)
        if matcher is not None:
            for token in tokens:
                matcher.take(token)
        return b"".join(map(token_word.pack, tokens))

    def _require_wrong(self, id_: int, matcher: Matcher | None) -> None:
        """G4: what a grammar forces is sampled, unless the constraint fails."""
        speculation = self.state.config.speculation
        if speculation is not None and speculation.method == "grammar" and not (matcher is not None and matcher.error):
            raise Divergence(f"G4: request {id_} samples another token than its grammar forces")

    def _choose(self, matcher: Matcher | None, total: int) -> int:
        wanted = total % self.state.config.vocab_size
        if matcher is None:
            return wanted
        mask = matcher.allowed()
        self._masks = xxhash.xxh3_64_intdigest(mask.tobytes(), seed=self._masks)
        return nearest(wanted, np.flatnonzero(mask))

    def _matcher(self, id_: int, preemptions: int, story: Story, end: int) -> Matcher | None:
        """The fold of a request's constraint, None if it has none; a request that comes back is folded anew."""
        request, key = self.state.requests[id_], (id_, preemptions)
        if (constraint := request.sampling.constraint) is None:
            return None
        if key not in self._matchers:
            answer = ids_of(story.data[4 * request.prompt_length : 4 * end])
            self._matchers[key] = Matcher(constraint, self._vocabulary, answer)
        return self._matchers[key]

    def _drafts(self, id_: int, preemptions: int, story: Story, end: int, most: int) -> list[int]:
        """What the drafter makes of a request's tokens."""
        request, config = self.state.requests[id_], self.state.config
        if config.speculation is not None and config.speculation.method == "grammar":
            matcher = self._matcher(id_, preemptions, story, end) if most else None
            return [] if matcher is None else matcher.forced()[:most]
        answer = ids_of(story.data[4 * request.prompt_length : 4 * end]) if most else ()
        weight, drafts = story.weights[end] if most else 0, list[int]()
        guesses = drafts_behind(config, request.sampling.seed + id_, end, most)
        for place, is_right in enumerate(guesses, start=end + 1):
            wanted = (request.sampling.seed + weight) % config.vocab_size
            right = constrained(config, request.sampling, (*answer, *drafts), wanted)
            drafts.append(right if is_right else (right + 1) % config.vocab_size)
            weight += place * drafts[-1]
        return drafts

    def _forget_stories(self) -> None:
        requests = self.state.requests
        if len(self._stories) > 2 * len(requests) + STORIES_SPARE:
            self._stories = {id_: story for id_, story in self._stories.items() if id_ in requests}
            self._matchers = {key: each for key, each in self._matchers.items() if key[0] in requests}
            self._salts = {id_: salt for id_, salt in self._salts.items() if id_ in requests}


def rebuilt(events: list[AnyEvent], contents: Contents | None = None) -> Rank:
    """A rank rebuilt from the log after a crash: it computes every step again, in order."""
    rank = Rank(first_of(events), contents)
    for event in events[1:]:
        rank.fold(event, digests=False)
    return rank
