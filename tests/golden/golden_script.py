"""Scripts of the engine: a line is a command, the indented lines below it are what happened. The words:

    engine block_size=4 ...      a fresh engine; fields of SchedulerConfig, the rest as in core_drive.config_of
    arrive a prompt=1*5,7 ...    a request named a; prompts are tokens, `1*5` is five ones, `i1*5` five of input 1, `r2:1*6` six of it in two rows; fields of Sampling, priority, salt
    plan | commit 9 b=0          decide and fold a step; give its samples: everybody 9, b 0
    step 9 b=0 | step x3         plan, then commit the oldest step (9 where nothing is said); three times
    pause keep | unpause         an engine pauses in a mode, and goes on; `weights 1 d`: version 1 of them, with digest d
    abort a b | reset | blocks   abort; forget cached contents; show every block table and the free blocks
    disk open 8 | read | end 2   (`store a`, `offer a`: its blocks; `came 2`; `leave a`) a tier; transfers; the oldest ends with 2
    arrive a keep=8:300 | tick 60 | yield   its first 8 tokens stay for 300 s; the clock stands at 60 s; decide which pins yield; guide=2:7*3: guidance of scale 2 away from three sevens; guide=2:7*3:prompt towards
    recover cautious=2 | lack | suffice   other ranks begin; below 2 they join one at a time; memory lacks; no more; `resume a has=9,9`: `arrive` with these tokens
A trace: `+a` is admitted, `-a` gives way, `a[0,5)` computes these positions, `*` and samples; `a:9` takes a token.
"""

from __future__ import annotations

from core_drive import Engine, arrival_of, check_decision, resumed_of

from vnext.sched.encoding import next_encoding
from vnext.sched.handover import next_hand_over
from vnext.sched.pinning import next_yield
from vnext.sched.schedule import schedule
from vnext.sched.shortage import raised, ran_short
from vnext.sched.tiering import evictions, next_cancellation, next_promotion
from vnext.state.events import (
    BlocksReceived,
    ClockTicked,
    EnginePaused,
    InputsFound,
    InputsSought,
    PrefixCacheReset,
    PromotionEnded,
    StepPlanned,
    TierChanged,
    TierOpened,
    WeightsChanged,
    pack_tokens,
)
from vnext.state.feasibility import refusal
from vnext.state.params import Guidance
from vnext.state.pool import free_blocks, pinned_pages
from vnext.state.state import State
from vnext.state.store.inputs import DIGEST_SIZE, input_tokens, with_rows

INDENT = "    "
TOKEN = 9


def played(text: str) -> str:
    """The script with a fresh trace under each command."""
    player, lines = Player(), []
    for line in text.splitlines():
        if line.startswith(INDENT):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            lines += [(INDENT + reported).rstrip() for reported in player.play(line.split())]
    return "\n".join(lines) + "\n"


class Player:
    """One script's engine and the names of its requests."""

    def __init__(self) -> None:
        self._begin({})

    def _begin(self, changes: dict) -> None:
        self.engine = Engine(**changes)
        self.names: dict[int, str] = {}
        self.offered: set[int] = set()

    def play(self, words: list[str]) -> list[str]:
        command, arguments = words[0], words[1:]
        match command:
            case "engine":
                given = _pairs(arguments)
                windows = tuple(int(window) for window in given.pop("windows", "").split(",") if window)
                self._begin({name: _value(value) for name, value in given.items()} | ({"windows": windows} if windows else {}))
                return []
            case "arrive" | "resume":
                return self._arrive(arguments[0], _pairs(arguments[1:]))
            case "recover":
                self.engine.recover(**{name: _value(value) for name, value in _pairs(arguments).items()})
                return [self._line("its ranks are new")]
            case "lack" | "suffice":
                state = self.engine.state
                self.engine.fold(ran_short(state, "rank 0 has no room") if command == "lack" else raised(state))
                return [self._line(f"at most {self.engine.state.config.max_num_batched_tokens} tokens a step")]
            case "plan":
                return [self._line(self._plan())]
            case "commit":
                return [self._line(*self._commit(arguments))]
            case "step":
                return self._steps(arguments)
            case "abort":
                self.engine.abort(*[self._id(name) for name in arguments])
                return [self._line("  ".join(f"{self.names[news.id]}:{news.finish}" for news in self.engine.news) or "nothing")]
            case "reset":
                self.engine.fold(PrefixCacheReset())
                return [self._line("")]
            case "pause" | "unpause":
                self.engine.fold(EnginePaused(mode="".join(arguments)))
                return [self._line("")]
            case "weights":
                self.engine.fold(WeightsChanged(version=int(arguments[0]), digest=arguments[1]))
                return [self._line("")]
            case "disk":
                return self._disk(*arguments)
            case "seek":
                self.engine.fold(InputsSought(id=self._id(arguments[0])))
                return [self._line(f"{arguments[0]} is looked for")]
            case "found":
                name, *places = arguments
                self.engine.fold(InputsFound(id=self._id(name), places=tuple(map(int, places))))
                return [self._line(f"{name} has {' '.join(places) or '-'}")]
            case "tick" | "yield":
                return [self._pinned(*arguments)]
            case "blocks":
                return [self._blocks()]
        raise ValueError(f"there is no command {command!r}")

    def _pinned(self, *seconds: str) -> str:
        """Behind a tick, or behind the pins that yield."""
        event = ClockTicked(seconds=int(seconds[0])) if seconds else next_yield(self.engine.state)
        if event is not None:
            self.engine.fold(event)
        return self._line(f"clock {self.engine.state.clock}  pinned {pinned_pages(self.engine.state.pool).tolist()}")

    def _disk(self, *arguments: str) -> list[str]:
        """open CAPACITY; store NAME: the full blocks of a waiting request; read: what is decided; end COUNT: of the oldest."""
        match arguments:
            case ("open", capacity):
                self.engine.fold(TierOpened(capacity=int(capacity)))
            case ("store", name):
                entry = next(entry for entry in self.engine.state.waiting if self.names[entry.id] == name)
                gone, kept = evictions(self.engine.state.tier, self.engine.state.pool, len(entry.block_hashes))
                stored = b"".join(entry.block_hashes)
                self.engine.fold(TierChanged(stored=stored, gone=b"".join(gone), kept=b"".join(kept)))
            case ("read",):
                event = next_cancellation(self.engine.state) or next_promotion(self.engine.state, self.offered)
                if event is None:
                    return [self._line("nothing to read")]
                self.engine.fold(event)
            case ("offer", name):
                self.offered.add(self._id(name))
            case ("leave", name):
                event = next_hand_over(self.engine.state, {self._id(name)})
                if event is None:
                    return [self._line("nothing leaves")]
                self.engine.fold(event)
                return [self._line(f"{event.count} blocks of {name} leave")]
            case ("came", count):
                moved = self.engine.state.tier.transfers[0]
                names = b"".join(moved.keys[moved.hits : moved.hits + int(count)])
                self.engine.fold(BlocksReceived(transfer=moved.number, count=int(count), names=names, checksums=names))
            case ("end", count):
                self.engine.fold(PromotionEnded(transfer=self.engine.state.tier.transfers[0].number, count=int(count)))
        tier = self.engine.state.tier
        moving = " ".join(f"{self.names[each.request]}:{len(each.pages) - each.hits}" for each in tier.transfers)
        return [self._line(f"disk {len(tier.disk)} of {tier.capacity}  reads {moving or '-'}")]

    def _id(self, name: str) -> int:
        return next(id_ for id_, known in self.names.items() if known == name)

    def _arrive(self, name: str, given: dict[str, str]) -> list[str]:
        """Nothing to tell, unless it is refused: it waits."""
        prompt = _all_tokens(given.pop("prompt"))
        has = _all_tokens(given.pop("has")) if "has" in given else None
        fields = {field: _value(value) for field, value in given.items()}
        if "salt" in fields:
            fields["cache_salt"] = fields.pop("salt")
        if "stop" in fields:
            fields["stop_token_ids"] = tuple(int(token) for token in str(fields.pop("stop")).split(","))
        if "keep" in fields:
            fields["retention"] = tuple(tuple(map(int, each.split(":"))) for each in str(fields.pop("keep")).split(","))
        if "guide" in fields:
            scale, negative, *is_prompt = str(fields.pop("guide")).split(":")
            beside = pack_tokens(_all_tokens(negative))
            fields["guidance"] = Guidance(scale=float(scale), beside=beside, is_prompt=bool(is_prompt))
        arrival = arrival_of(self.engine.state.next_id, prompt, **fields)
        if has is not None:
            arrival = resumed_of(self.engine.state.next_id, prompt, has, **fields)
        why_not = refusal(self.engine.state.config, arrival)
        if why_not is not None:
            return [f"refused: {why_not}"]
        self.names[arrival.id] = name
        self.engine.fold(arrival)
        return []

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _steps(self, arguments: list[str]) -> list[str]:
        count = 1
        if arguments and arguments[0].startswith("x"):
            count, arguments = int(arguments[0][1:]), arguments[1:]
        lines = []
        for _ in range(count):
            planned = self._plan()
            taken = self._commit(arguments)[1] if self.engine.state.in_flight else ""
            lines.append(self._line(planned, taken))
        return lines

    def _plan(self) -> str:
        encoded = []
        while self.engine.state.config.input_units and (event := next_encoding(self.engine.state)) is not None:
            self.engine.fold(event)
            encoded.append(f"{self.names[event.id]}@{event.place}+{event.units} ")
        before, plan = self.engine.state, schedule(self.engine.state)
        if plan is not None:
            self.engine.fold(plan)
        check_decision(before, plan, self.engine.state)
        return "nothing to plan" if plan is None else self._planned(before, plan, "".join(encoded))

    def _planned(self, before: State, plan: StepPlanned, encoded: str) -> str:
        scheduled, running = self.engine.state.in_flight[-1], set(before.rows.id.tolist())
        entries = zip(
            scheduled.ids.tolist(), scheduled.starts.tolist(), scheduled.counts.tolist(), scheduled.samples.tolist()
        )
        reported = [
            f"{'' if id_ in running else '+'}{self.names[id_]}[{start},{start + count}){'*' if samples else ''}"
            for id_, start, count, samples in entries
        ]
        reported += [f"-{self.names[int(before.rows.id[row])]}" for row in plan.preempted]
        return f"step {plan.step}  {encoded}" + " ".join(reported)

    def _commit(self, arguments: list[str]) -> tuple[str, str]:
        scheduled = self.engine.state.in_flight[0]
        tokens = {self._id(name): int(token) for name, token in _pairs([word for word in arguments if "=" in word]).items()}
        default = next((int(word) for word in arguments if "=" not in word), TOKEN)
        asked = [int(id_) for id_ in scheduled.ids[scheduled.samples]]
        news = {item.sample: item for item in self.engine.commit(*[tokens.get(id_, default) for id_ in asked])}
        reported = [
            f"{self.names[id_]}:{f'{news[place].token} {news[place].finish}'.strip() if place in news else 'dropped'}"
            for place, id_ in enumerate(asked)
        ]
        return f"step {scheduled.step}", " ".join(reported) or "-"

    # ---- looking -------------------------------------------------------------------------------------------------

    def _line(self, what: str, taken: str = "") -> str:
        """Columns: what was planned, what was sampled, who runs, who waits in which order, how many blocks are free."""
        engine = self.engine
        run, wait = self._named(engine.running), self._named(engine.waiting)
        return f"{what:<40} | {taken:<30} | run {run:<7} | wait {wait:<7} | free {engine.free}"

    def _named(self, ids: list[int]) -> str:
        return " ".join(self.names[id_] for id_ in ids) or "-"

    def _blocks(self) -> str:
        """Tables of the rows, then the free blocks in the order in which they leave; a prime marks content that is kept."""
        pool, engine = self.engine.state.pool, self.engine
        tables = [f"{self.names[id_]} {' '.join(map(str, engine.blocks(id_)))}" for id_ in engine.running]
        free = [f"{block}'" if pool.prefix_index.hash_of(block) else str(block) for block in free_blocks(pool).tolist()]
        return " | ".join([*tables, "free " + (" ".join(free) or "-")])


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _value(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("0."):
        return float(text)
    return int(text) if text.lstrip("-").isdigit() else text


def _all_tokens(text: str) -> list[int]:
    return [int(token) for part in text.split(",") if part for token in _tokens(part)]


def _tokens(part: str) -> list[str]:
    token, _, count = part.partition("*")
    if token.startswith("r"):
        rows, _, image = token[1:].partition(":")
        return list(map(str, input_tokens(with_rows(int(image).to_bytes(DIGEST_SIZE, "little"), int(rows)), int(count)).tolist()))
    if token.startswith("i"):
        return list(map(str, input_tokens(int(token[1:]).to_bytes(DIGEST_SIZE, "big"), int(count)).tolist()))
    return [token] * int(count or 1)
