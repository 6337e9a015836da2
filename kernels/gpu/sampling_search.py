"""Device functions that find where a row of logits is cut: which ids are among the most likely ones.

All filters keep a beginning of one order: logits descending, of equal ones ids ascending. So a filter's result is its
last id, held as a *place*: a 64-bit integer that is the greater the earlier an id comes (ordered bits of the logit, then
the id's complement). Nothing is sorted. Passes over the vocabulary with eight thresholds each narrow the interval of
logits in which the last id lies, until what lies in it fits into a buffer; there the search ends in registers.

What each function takes: ``row_logits`` fp32, ``listed`` int32 (groups of ``GROUP`` ids that hold anything of
interest, ascending), ``near`` int64 (the buffer); ``lo`` and ``hi`` bound the interval of keys, lo <= key < hi.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.sampling import GROUP

CAPACITY = 2048
"""Places that the buffer of a row holds."""

MAX_VOCABULARY = 1 << 24

_GROUP = tl.constexpr(GROUP)
_CAPACITY = tl.constexpr(CAPACITY)
_ID_BITS = tl.constexpr(24)
_ID_MASK = tl.constexpr(MAX_VOCABULARY - 1)
_BEYOND = tl.constexpr(1 << 22)  # a group past every vocabulary
_MASKED_KEY = tl.constexpr(-2139095041)  # ordered(-inf)
_LOG2_E = tl.constexpr(1.4426950408889634)
_VALUE_PASSES = tl.constexpr(4)
_VALUE_RANGE = tl.constexpr(1000.0)


@triton.jit
def ordered(values):
    """fp32 -> int32 in the same order; both zeros are equal."""
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(keys):
    """The fp32 value of an ordered int32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(keys, ids):
    """Keys and ids int32 -> places int64, all different."""
    return (keys.to(tl.int64) << _ID_BITS) + (_ID_MASK - ids)


@triton.jit
def place_of_value(value):
    """The last place of logits equal to a scalar fp32, rounded up where it lies between two: value fp64."""
    rounded = value.to(tl.float32)
    key = ordered(rounded) + (rounded.to(tl.float64) < value).to(tl.int32)
    return tl.maximum(key, _MASKED_KEY + 1).to(tl.int64) << _ID_BITS


@triton.jit
def highest_reached(places, weights, lo, hi, above, target):
    """The greatest place p of [lo, hi) with ``above + sum of weights at places >= p`` at least the target; else lo.

    places int64 and weights fp64 of one length; lo, hi int64; above, target fp64.
    """
    step = tl.arange(0, 8)
    while hi - lo > 1:
        thresholds = lo + (((hi - lo) * step) >> 3)
        thresholds = tl.where(step == 7, tl.maximum(thresholds, lo + 1), thresholds)
        sums = tl.sum(tl.where(places[None, :] >= thresholds[:, None], weights[None, :], 0.0), axis=1) + above
        reached = (sums >= target) | (thresholds == lo)
        lo = tl.max(tl.where(reached, thresholds, lo), axis=0)
        hi = tl.min(tl.where(reached, hi, thresholds), axis=0)
    return lo


@triton.jit
def list_groups(maxima, groups, lowest_key, listed):
    """Write the groups whose greatest logit is at least the key; -> how many."""
    is_listed = ordered(maxima) >= lowest_key
    slots = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(listed + slots, groups, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), axis=0)


@triton.jit
def _thresholds(lo, hi, scale, passes):
    """Eight keys from lo on, evenly apart: in value at first, which is the better guess, then in key, which ends."""
    step = tl.arange(0, 8)
    by_key = lo + (((hi - lo) * step) >> 3)
    by_key = tl.where(step == 7, tl.maximum(by_key, lo + 1), by_key)
    lowest, highest = value_of(lo.to(tl.int32)), value_of((hi - 1).to(tl.int32))
    by_value = ordered(lowest + (highest - lowest) * (step.to(tl.float32) * 0.125)).to(tl.int64)
    by_value = tl.where(step == 0, lo, tl.minimum(tl.maximum(by_value, lo), hi - 1))
    use_value = (passes < _VALUE_PASSES) & ((highest - lowest) * scale < _VALUE_RANGE)
    return tl.where(use_value, by_value, by_key)


@triton.jit
def _load_listed(row_logits, listed, num_listed, vocabulary, start, TILE: tl.constexpr):
    """Ids and logits of ``TILE`` listed groups from ``start`` on; past the end -inf."""
    lane = tl.arange(0, TILE * _GROUP)
    index = start + lane // _GROUP
    group = tl.load(listed + index, mask=index < num_listed, other=_BEYOND)
    ids = group * _GROUP + lane % _GROUP
    return ids, tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf"))


@triton.jit
def _weigh_tile(ids, values, numbers, masses, thresholds, cut_key, cut_id, top, scale):
    keys = ordered(values)
    keys = tl.where((keys == cut_key) & (ids > cut_id), -2147483648, keys)
    mass = tl.exp2((values - top) * scale)
    is_above = keys[None, :] >= thresholds[:, None]
    return numbers + is_above.to(tl.int32), masses + tl.where(is_above, mass[None, :], 0.0)


@triton.jit
def _weigh(row_logits, listed, num_listed, vocabulary, cut, thresholds, top, scale, TILE: tl.constexpr):
    """Of ids at or before the cut with a key at or above each threshold [8]: the number, int32, and mass, fp64.

    The mass of an id is ``2^((logit - top) * scale)``.
    """
    keys = thresholds.to(tl.int32)
    numbers = tl.zeros([8, TILE * _GROUP], tl.int32)
    masses = tl.zeros([8, TILE * _GROUP], tl.float32)
    cut_key, cut_id = (cut >> _ID_BITS).to(tl.int32), _ID_MASK - (cut & _ID_MASK).to(tl.int32)
    start = num_listed * 0
    while start < num_listed:
        # Two tiles at a time, so that more loads are under way.
        ids, values = _load_listed(row_logits, listed, num_listed, vocabulary, start, TILE)
        more_ids, more_values = _load_listed(row_logits, listed, num_listed, vocabulary, start + TILE, TILE)
        numbers, masses = _weigh_tile(ids, values, numbers, masses, keys, cut_key, cut_id, top, scale)
        numbers, masses = _weigh_tile(more_ids, more_values, numbers, masses, keys, cut_key, cut_id, top, scale)
        start += 2 * TILE
    return tl.sum(numbers, axis=1), tl.sum(masses.to(tl.float64), axis=1)


@triton.jit
def _collect_near(row_logits, listed, num_listed, vocabulary, cut, lo, hi, near, TILE: tl.constexpr):
    """Write the places of ids at or before the cut with lo <= key < hi, up to the buffer's end; -> how many there are."""
    found = num_listed * 0
    tl.debug_barrier()  # the buffer's last readers are done
    start = num_listed * 0
    while start < num_listed:
        ids, values = _load_listed(row_logits, listed, num_listed, vocabulary, start, TILE)
        keys = ordered(values)
        places = place_of(keys, ids)
        is_near = (keys >= lo.to(tl.int32)) & (keys < hi.to(tl.int32)) & (places >= cut)
        number = tl.sum(is_near.to(tl.int32), axis=0)
        if number > 0:
            slots = found + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
            tl.store(near + slots, places, mask=is_near & (slots < _CAPACITY))
        found += number
        start += TILE
    tl.debug_barrier()
    return found


@triton.jit
def bracket(
    row_logits,
    listed,
    num_listed,
    vocabulary,
    cut,
    near,
    lo,
    hi,
    guess,
    target,
    share,
    top,
    scale,
    BY_NUMBER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Narrow [lo, hi) around the last id until its ids fit into the buffer, or it is one key, and fill the buffer.

    Wanted is the least number of ids, from the most likely down, whose weight reaches the target. A negative target
    means ``share`` of the weight of all ids at or before the cut; then lo must be the cut's key. ``guess``: how many
    ids there may be. -> lo, hi, weight above hi, number in [lo, hi), target. Where the target is not reached the
    interval is empty.
    """
    above = top.to(tl.float64) * 0.0
    number_above = num_listed * 0
    number = guess
    passes = num_listed * 0
    is_done = num_listed < 0
    while not is_done:
        if (number > _CAPACITY) & (hi - lo > 1):
            thresholds = _thresholds(lo, hi, scale, passes)
            numbers, masses = _weigh(
                row_logits, listed, num_listed, vocabulary, cut, thresholds, top, scale, TILE
            )
            weights = numbers.to(tl.float64) if BY_NUMBER else masses
            total = tl.max(weights, axis=0)
            target = tl.where(target < 0, share * total, target)
            reached = weights >= target
            above = tl.max(tl.where(reached, above, weights), axis=0)
            number_above = tl.max(tl.where(reached, number_above, numbers), axis=0)
            number = tl.min(tl.where(reached, numbers, 2147483647), axis=0) - number_above
            new_lo = tl.max(tl.where(reached, thresholds, lo), axis=0)
            hi = tl.min(tl.where(reached, hi, thresholds), axis=0)
            number = tl.where(total < target, 0, number)
            lo = new_lo
            passes += 1
        else:
            number = _collect_near(row_logits, listed, num_listed, vocabulary, cut, lo, hi, near, TILE)
            is_done = (number <= _CAPACITY) | (hi - lo <= 1)
    return lo, hi, above, number, target


@triton.jit
def nth_of_equals(row_logits, vocabulary, key, cut, nth, LENGTH: tl.constexpr):
    """The id of the nth logit (from 1) with this key among ids at or before the cut. There are that many."""
    lane = tl.arange(0, LENGTH)
    found = nth * 0
    last = nth * 0
    start = nth * 0
    while found < nth:
        ids = start + lane
        keys = ordered(tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")))
        is_equal = (keys == key) & (place_of(keys, ids) >= cut) & (ids < vocabulary)
        counts = found + tl.cumsum(is_equal.to(tl.int32), axis=0)
        last = tl.min(tl.where(is_equal & (counts == nth), ids, _ID_MASK), axis=0)
        found += tl.sum(is_equal.to(tl.int32), axis=0)
        found = tl.where(start >= vocabulary, nth, found)
        start += LENGTH
    return last


@triton.jit
def last_place(
    row_logits,
    vocabulary,
    cut,
    near,
    lo,
    hi,
    above,
    number,
    target,
    share,
    top,
    temperature,
    BY_NUMBER: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """The place of the last id that is kept, once ``bracket`` has filled the buffer. Exact weights, fp64."""
    least = 1e-300  # at least one id is kept
    if number <= _CAPACITY:
        lane = tl.arange(0, _CAPACITY)
        places = tl.load(near + lane, mask=lane < number, other=-9223372036854775808)
        is_left = (lane < number) & (places >= cut)
        if BY_NUMBER:
            weights = is_left.to(tl.float64)
        else:
            values = value_of((places >> _ID_BITS).to(tl.int32)).to(tl.float64)
            distance = tl.where(is_left, (values - top.to(tl.float64)) / temperature.to(tl.float64), 0.0)
            weights = tl.where(is_left, tl.exp(distance), 0.0)
        target = tl.where(target < 0, share * (above + tl.sum(weights, axis=0)), target)
        place = highest_reached(
            places, weights, lo << _ID_BITS, hi << _ID_BITS, above, tl.maximum(target, least)
        )
    else:
        key = lo.to(tl.int32)
        if BY_NUMBER:
            weight = above * 0.0 + 1.0
        else:
            weight = tl.exp((value_of(key).to(tl.float64) - top.to(tl.float64)) / temperature.to(tl.float64))
        target = tl.where(target < 0, share * (above + weight * number), target)
        wanted = tl.minimum(tl.maximum(tl.ceil((target - above) / weight), 1.0), number.to(tl.float64))
        place = place_of(key, nth_of_equals(row_logits, vocabulary, key, cut, wanted.to(tl.int32), LENGTH))
    return place
