"""The next plan: which sequences compute how many tokens, in which blocks, within one step's budget.

Running sequences come first, then waiting ones in the order of the policy. Nothing here asks whether tokens are a
prompt's, a decode's or recomputed: each sequence is given min(tokens not planned, chunk cap, budget left).
"""

from octavo.scheduler.adoption import Adoption, Start
from octavo.scheduler.batch import Batch
from octavo.scheduler.blocks import BlockPool
from octavo.scheduler.cache import PrefixCache
from octavo.scheduler.config import Limits
from octavo.scheduler.draft import MAX_NEW_IDS, BuiltPlan, Columns, Draft, Fork, num_new_ids, row_of
from octavo.scheduler.errors import InvariantViolation
from octavo.scheduler.groups import Groups, group_of, restart
from octavo.scheduler.policy import Policy
from octavo.scheduler.prefix import PrefixIndex
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.room import Room
from octavo.scheduler.running import check_running
from octavo.scheduler.sequence import Request, Sequence, Status
from octavo.scheduler.tables import BlockTables
from octavo.wire.ids import BlockId, Row, SessionId

ROOM_INTERVAL_STEPS = 16
"""While the same sequences run and all of them together would not make room, it is looked for so rarely."""


class Planner:
    """Blocks, tables and rows of one worker, and the plans over them. It dies with the worker's epoch."""

    def __init__(
        self, epoch: SessionId, limits: Limits, waiting: WaitingQueue, policy: Policy, max_preemptions: int
    ) -> None:
        self.limits = limits
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.waiting_reason = "the next plan"
        """What kept the newest plan from admitting the next waiting sequence; each ends as results come."""
        self.pool = BlockPool(limits.num_blocks)
        self.batch = Batch(limits.max_num_seqs)
        index = PrefixIndex()
        self.adoption = Adoption(self.pool, index, limits.block_size)
        self.tables = BlockTables(self.pool, index, limits.block_size, self.adoption)
        self.cache = PrefixCache(index, self.pool, self.tables, limits.block_size)
        self.groups = Groups(self.batch, self.tables, limits.block_size)
        self._epoch = epoch
        self._waiting = waiting
        self._policy = policy
        self._room = Room(self.batch, self.tables, limits.block_size, max_preemptions)
        self._no_room: tuple[int, int] | None = None  # whom no victims would make room for, in which batch
        self._decode: tuple[int, Columns] | None = None  # of the newest plan in which each of a batch drew a token

    def remove(self, sequence: Sequence, status: Status, newest_step: int) -> None:
        """Take a running sequence's row and blocks; no plan after `newest_step` names it."""
        self.cache.publish(sequence, sequence.num_confirmed)
        self.tables.release(sequence.number)
        self.batch.leave(sequence, status, newest_step)

    def put_back(self, request: Request, newest_step: int) -> None:
        """Let a group begin anew: its search, from rows and blocks to come; nothing counts that plans draw for it until now."""
        self.num_recomputed_tokens += sum(max(0, b.num_planned - b.num_prompt) for b in group_of(request).beams)
        self.groups.leave(request, Status.HELD, newest_step)
        restart(request, newest_step)
        self._waiting.add(request.sequences[0])

    def holders(self, blocks: set[BlockId]) -> list[Sequence]:
        """Return the running sequences whose tables name one of some blocks."""
        return [s for s in self.batch if not blocks.isdisjoint(self.tables.table(s.number))] if blocks else []

    def build(self, step: int, num_completed: int, alone: Request | None = None) -> BuiltPlan | None:
        """Build plan number `step`; None if nothing can be computed now.

        Args:
            step: its number.
            num_completed: newest plan whose result is back.
            alone: the only request that may compute in it; the others keep rows and blocks that it does not need.
        """
        draft = Draft.begin(step, self.limits, alone)
        self.cache.begin_step()
        if alone is None:
            self._make_room(draft, num_completed)
        self._choose_running(draft)
        for sequence in draft.filled:
            self.cache.publish(sequence, sequence.num_planned)
        for sequence in draft.leaders:
            self._release_siblings(sequence, draft)
        if alone is None:
            if self.adoption:
                self._choose_adopting(draft, num_completed)
            self._choose_waiting(draft, num_completed)
        else:
            self._let_in(alone, draft, num_completed)
        built = self._commit(draft) if draft.sequences else None
        self.tables.unpin()
        return built

    def check(self) -> None:
        """Prove blocks, tables, rows and the prefix cache against each other.

        Raises:
            InvariantViolation: they contradict.
        """
        self.batch.check()
        self.tables.check({s.number: s.num_planned for s in self.batch})
        self.adoption.check()
        self.cache.check(self.batch)
        for s in self.batch:
            check_running(s, self.tables)
            if self.tables.is_protected(s.number) != self._room.needs_protection(s):
                raise InvariantViolation(f"{s.request.name}/{s.choice}: preempted {s.num_preemptions} times")

    # Running sequences

    def _choose_running(self, draft: Draft) -> None:
        add = draft.sequences.append
        num_left, block_size = draft.num_left, self.limits.block_size
        alone = draft.alone
        for s in list(self.batch) if alone is None else [s for s in self.batch if s.request is alone]:
            if num_left <= 0:
                break
            end = s.num_planned + 1
            if end == s.num_expected and (end <= s.num_fast or self._add_block(s, end, block_size, draft)):
                # Draft.add for the common case, one more token of a decode: this loop is most of a step's cost.
                s.num_planned = end
                s.num_expected = end + 1
                num_left -= 1
                add(s)
            else:
                draft.num_left = num_left
                self._choose_one(s, draft)
                num_left = draft.num_left
        draft.num_left = num_left

    def _add_block(self, s: Sequence, end: int, block_size: int, draft: Draft) -> bool:
        """Give a decode whose blocks are full another one, for token `end`; False if that is not all there is to do."""
        full = end - 1
        if full != s.num_fast or full % block_size or end > s.plan_limit or not full:
            return False
        if not self.tables.add_block(s.number):
            return False
        s.num_fast = min(full + block_size, s.plan_limit)
        draft.grown[s] = None
        draft.filled.append(s)
        return True

    def _choose_one(self, s: Sequence, draft: Draft) -> None:
        if s.row is None:  # preempted for one before it
            return
        if s.request.group is not None and s.request.group.children:
            self._seat(s.request, draft)
            return
        num_tokens = draft.offer(s.num_plannable)
        if num_tokens <= 0 or not self._secure(s, s.num_planned + num_tokens, draft):
            return
        self._extend(s, num_tokens, draft)
        draft.filled.append(s)
        if s.num_planned == s.num_prompt and s.request.held:
            draft.leaders.append(s)

    def _seat(self, request: Request, draft: Draft) -> None:
        """Plan the next beams of a group, all or none."""
        group = group_of(request)
        if len(group.children) > draft.num_left:
            return
        some_beam = group.beams[0]
        while not self.tables.can_have(some_beam.number, self.groups.num_wanted(request)):
            if not self._give_way(some_beam, draft):
                return
        for beam in self.groups.seat(request, draft):
            self._extend(beam, 1, draft)

    def _extend(self, s: Sequence, num_tokens: int, draft: Draft) -> None:
        """Give a sequence blocks for its next tokens, and the tokens; `can_grow` said that it can have them."""
        number, end = s.number, s.num_planned + num_tokens
        if s.num_planned and self.tables.must_copy(number, s.num_planned):
            draft.copies[s] = self.tables.copy_last(number)
        self.tables.grow(number, end)
        num_blocks = len(self.tables.table(number))
        if num_blocks > s.num_blocks_sent:
            draft.grown[s] = None
        draft.add(s, num_tokens)
        is_behind = s.num_planned < s.num_known  # whoever draws a first token comes here, not to the fast path
        s.num_fast = 0 if is_behind else min(num_blocks * self.limits.block_size, s.plan_limit)

    def _secure(self, sequence: Sequence, end: int, draft: Draft) -> bool:
        """Preempt until a running sequence can grow to `end` tokens; False if it had to give way itself."""
        while not self.tables.can_grow(sequence.number, sequence.num_planned, end):
            if not self._give_way(sequence, draft):
                return False
        return True

    def _give_way(self, sequence: Sequence, draft: Draft) -> bool:
        """Preempt one that runs, for a sequence that lacks blocks; False if that was the sequence itself."""
        if draft.alone is not None and self._put_aside(draft):
            return True
        # Who lacks blocks is unprotected itself, so there is always a victim.
        victims = (s for s in self.batch if not self.tables.is_protected(s.number) and s.request not in draft.seated)
        self._preempt(min(victims, key=self._policy.yields_first), draft)
        return sequence.row is not None

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        if (group := sequence.request.group) is None:
            draft.take_back(sequence)
            self.remove(sequence, Status.WAITING, draft.step - 1)
            sequence.num_preemptions += 1
            self._waiting.add(sequence)
        else:
            for beam in group.beams:
                draft.take_back(beam)
            self.put_back(sequence.request, draft.step - 1)
            sequence.request.sequences[0].num_preemptions += 1
        self.num_preemptions += 1

    def _put_aside(self, draft: Draft) -> bool:
        """Take row and blocks of one that has to wait anyway for the request that runs alone; False if there is none.

        It is not preempted for want of blocks, so it does not count among its preemptions.
        """
        others = [s for s in self.batch if s.request is not draft.alone]
        if not others:
            return False
        victim = min(others, key=self._policy.yields_first)
        if victim.request.group is None:
            self.remove(victim, Status.WAITING, draft.step - 1)
            self._waiting.add(victim)
        else:
            self.put_back(victim.request, draft.step - 1)
        self.num_preemptions += 1
        return True

    # Waiting sequences

    def _let_in(self, alone: Request, draft: Draft, num_completed: int) -> None:
        """Let the waiting sequences of the request that runs alone enter, whatever they must take from others for it."""
        self.waiting_reason = "a request that may have killed its worker, and runs alone"
        for s in alone.sequences:
            if s.status is not Status.WAITING:
                continue
            while self.batch.num_free_rows < s.num_rows or self._is_short(s):
                if not self._put_aside(draft):
                    return
            if self._hindrance(s, draft, num_completed) is not None:
                return
            self._enter(s, self._start_of(s), draft)

    def _is_short(self, s: Sequence) -> bool:
        return self._room.num_missing(s, self._start_of(s).blocks, self._room.num_owed()) > 0

    def _make_room(self, draft: Draft, num_completed: int) -> None:
        """Let running sequences give way to the next waiting one, where the policy says so and it suffices."""
        head = self._waiting.head
        if head is None or self.batch.num_free_rows < head.num_rows or head.newest_step > num_completed:
            return
        if self.adoption.is_grace:
            return  # what became free could not be given to it
        victims = [s for s in self.batch if not self.tables.is_protected(s.number) and self._policy.may_evict(head, s)]
        if not victims or (self._no_room == (head.number, self.batch.version) and draft.step % ROOM_INTERVAL_STEPS):
            return
        hits = self._start_of(head).blocks
        missing = self._room.num_missing(head, hits, self._room.num_owed())
        if missing <= 0:
            return
        victims.sort(key=self._policy.yields_first)
        gains = self.tables.gains([s.number for s in victims], hits)
        for count, (victim, gained) in enumerate(zip(victims, gains, strict=True), start=1):
            missing -= gained + self._room.num_owed([victim])
            if missing <= 0:
                for chosen in victims[:count]:
                    if chosen.row is not None:  # it may have gone with another beam of its group
                        self._preempt(chosen, draft)
                return
        self._no_room = (head.number, self.batch.version)

    def _choose_waiting(self, draft: Draft, num_completed: int) -> None:
        num_owed: int | None = None
        self.waiting_reason = "the next plan"
        while (head := self._waiting.head) is not None:
            if (reason := self._hindrance(head, draft, num_completed)) is not None:
                self.waiting_reason = reason
                return
            if num_owed is None:
                num_owed = self._room.num_owed()
            if num_owed >= self.tables.num_available:  # whatever it finds, it needs one more
                self.waiting_reason = "free blocks"
                return
            start = self._start_of(head)
            num_missing = self._room.num_missing(head, start.blocks, num_owed)
            if self.adoption.is_grace and num_missing + self.adoption.num_free_blocks() > 0:
                self.waiting_reason = "requests that may go on from the worker's rows"
                return
            if num_missing > 0:
                self.waiting_reason = f"{num_missing} more free blocks"
                return
            self._enter(head, start, draft)
            if not self.tables.is_protected(head.number):
                num_owed += self.tables.blocks_for(head.num_known) - len(self.tables.table(head.number))

    def _choose_adopting(self, draft: Draft, num_completed: int) -> None:
        """Let those go on first that the worker had rows for: they had their turn in the queue before."""
        for s in list(self._waiting):
            start = self.adoption.find(s)
            if start is None or self._hindrance(s, draft, num_completed) is not None:
                continue
            if self._room.num_missing(s, start.blocks, self._room.num_owed()) <= 0:
                self._enter(s, self._start_of(s), draft)

    def _start_of(self, sequence: Sequence) -> Start:
        """Return where a sequence can begin: with what the prefix cache holds, or its worker's row, if that is more."""
        found = self.cache.find(sequence)
        start = Start(found, len(found) * self.limits.block_size)
        adopted = self.adoption.find(sequence)
        return start if adopted is None or adopted.num_tokens <= start.num_tokens else adopted

    def _hindrance(self, head: Sequence, draft: Draft, num_completed: int) -> str | None:
        """Return what but blocks the next sequence must wait for, None if there is nothing."""
        if self.batch.num_free_rows < head.num_rows:
            wanted = "one" if head.num_rows == 1 else head.num_rows
            return f"{wanted} of {self.batch.num_rows} rows (max_num_seqs)"
        if draft.num_left <= 0:
            return "tokens of a step (max_num_batched_tokens)"
        if head.newest_step > num_completed:
            return "ids of its own that are still under way"
        if draft.entered and draft.num_new_ids + num_new_ids(head) > MAX_NEW_IDS:
            return "room in a plan for its ids"
        return None

    def _enter(self, s: Sequence, start: Start, draft: Draft) -> None:
        draft.num_new_ids += num_new_ids(s)
        self._take_row(s)
        num_reserved = self._room.most_blocks(s) - len(start.blocks) if self._room.needs_protection(s) else None
        self.tables.begin(s.number, start.blocks, num_reserved)
        if s.request.group is not None:
            self.groups.enter(s)
        s.num_cached = s.num_planned = s.num_confirmed = start.num_tokens
        s.num_hit, s.num_published = (0, 0) if start.is_adopted else (start.num_tokens, len(start.blocks))
        s.publishes = s.uses_cache and (s.publishes or not start.is_adopted)
        self.adoption.take(s, start)
        s.first_told = s.request.num_prompt_told if s.tells_prompt else s.num_prompt
        self.num_recomputed_tokens += max(0, min(s.num_furthest, s.num_known) - s.num_cached)
        self._extend(s, draft.offer(min(s.num_known, s.plan_limit) - s.num_cached), draft)
        draft.entered.append(s)
        self.cache.publish(s, s.num_planned)
        if s.num_planned == s.num_prompt and s.request.held:
            self._release_siblings(s, draft)

    def _take_row(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.batch.enter(sequence)
        self._policy.on_entered(sequence)

    # Choices of one request

    def _release_siblings(self, leader: Sequence, draft: Draft) -> None:
        """Let the other choices wait for nothing but their turn; those whose turn it is start from the leader's blocks.

        What is left in the queue finds the prompt in the prefix cache later.
        """
        siblings = leader.request.held
        for sibling in siblings:
            sibling.status = Status.WAITING
            self._waiting.add(sibling)
        if self._room.needs_protection(leader):
            return
        num_owed = self._room.num_owed()
        for sibling in siblings:
            num_owed += 1  # its next token takes a block, a copy of the last one or a new one
            has_room = self.batch.has_free_row and num_owed <= self.tables.num_available
            if not has_room or self._waiting.head is not sibling:
                return
            self._fork(leader, sibling, draft)

    def _fork(self, source: Sequence, target: Sequence, draft: Draft) -> None:
        self._take_row(target)
        self.adoption.take(target, Start([], 0))
        self.tables.fork(source.number, target.number)
        target.fork_from(source)
        target.num_blocks_sent = len(self.tables.table(target.number))
        if source.num_planned % self.limits.block_size:
            # The last block is shared: whoever writes to it next copies it first.
            source.num_fast = target.num_fast = 0
        else:
            target.num_fast = min(source.num_planned, target.plan_limit)
        draft.forks.append(Fork(source, target))

    # The plan

    def _commit(self, draft: Draft) -> BuiltPlan:
        append_row: list[Row] = []
        append_block: list[BlockId] = []
        for s in draft.grown:
            table = self.tables.table(s.number)
            new_blocks = table[s.num_blocks_sent :]
            append_row += [row_of(s)] * len(new_blocks)
            append_block += new_blocks
            s.num_blocks_sent = len(table)
        columns = self._columns(draft)
        plan = draft.to_plan(self._epoch, columns, append_row, append_block, self.batch.take_freed_rows())
        self._policy.on_planned(columns.sequences, columns.counts)
        return BuiltPlan(plan, draft.record(columns), draft.entered + [fork.target for fork in draft.forks])

    def _columns(self, draft: Draft) -> Columns:
        """Return the columns of the plan's rows: the last ones, if the same sequences decode again."""
        version, old = self.batch.version, self._decode
        if old is not None and old[0] == version and not draft.chunks and old[1].sequences == draft.sequences:
            return old[1]
        columns = draft.columns()
        if not draft.chunks:
            self._decode = (version, columns)
        return columns
