"""Device functions that find where a row of logits is cut: which ids are among the most likely ones.

All filters keep a beginning of one order: logits descending, of equal ones ids ascending. So a filter's result is its
last id, held as a *place*: a 64-bit integer that is the greater the earlier an id comes (ordered bits of the logit, then
the id's complement). Nothing is sorted. Passes over the vocabulary with four thresholds each narrow the interval of
logits in which the last id lies, until what lies in it fits into a buffer; there the weights before each id are summed up.

What each function takes: ``row_logits`` fp32; ``listed`` int32, groups of ``GROUP`` ids that hold anything of
interest; ``near`` int64, the buffer, ``BUFFER`` long: places, then their weights; ``lo`` and ``hi``, the interval of
keys, lo <= key < hi.
"""

import triton
import triton.language as tl

from octavo.kernels.gpu.sampling import GROUP

CAPACITY = 1024
"""Places that the buffer of a row holds."""

BUFFER = 2 * CAPACITY

MAX_VOCABULARY = 1 << 24

_GROUP = tl.constexpr(GROUP)
_CAPACITY = tl.constexpr(CAPACITY)
_ID_BITS = tl.constexpr(24)
_ID_MASK = tl.constexpr(MAX_VOCABULARY - 1)
_BEYOND = tl.constexpr(1 << 22)  # a group past every vocabulary
_MASKED_KEY = tl.constexpr(-2139095041)  # ordered(-inf)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASS_UNIT = tl.constexpr(2.0**-45)
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
def list_groups(maxima, groups, lowest_key, listed):
    """Write the groups whose greatest logit is at least the key; -> how many."""
    is_listed = ordered(maxima) >= lowest_key
    slots = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(listed + slots, groups, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), axis=0)


@triton.jit
def _thresholds(lo, hi, scale, passes, COUNT: tl.constexpr):
    """``COUNT`` keys from lo on, evenly apart: in value at first, which is the better guess, then in key, which ends."""
    step = tl.arange(0, COUNT)
    by_key = lo + (hi - lo) * step // COUNT
    by_key = tl.where(step == COUNT - 1, tl.maximum(by_key, lo + 1), by_key)
    lowest, highest = value_of(lo.to(tl.int32)), value_of((hi - 1).to(tl.int32))
    by_value = ordered(lowest + (highest - lowest) * (step.to(tl.float32) * (1.0 / COUNT))).to(tl.int64)
    by_value = tl.where(step == 0, lo, tl.minimum(tl.maximum(by_value, lo), hi - 1))
    use_value = (passes < _VALUE_PASSES) & ((highest - lowest) * scale < _VALUE_RANGE)
    return tl.where(use_value, by_value, by_key)


@triton.jit
def nearly_kth(keys, groups, num_groups, k, end, scale):
    """A key, int64, that at least k of the keys [GROUPS] int32 reach, and few more do: 1 <= k <= num_groups."""
    lo = tl.min(tl.where(groups < num_groups, keys, 2147483647), axis=0).to(tl.int64)
    hi = end
    number = num_groups + 0 * tl.max(groups, axis=0)
    passes = number * 0
    while (number > k + (k >> 2) + 8) & (hi - lo > 1):
        thresholds = _thresholds(lo, hi, scale, passes, 8)
        is_above = (keys[None, :] >= thresholds.to(tl.int32)[:, None]) & (groups < num_groups)[None, :]
        numbers = tl.sum(is_above.to(tl.int32), axis=1)
        reached = numbers >= k
        lo = tl.max(tl.where(reached, thresholds, lo), axis=0)
        hi = tl.min(tl.where(reached, hi, thresholds), axis=0)
        number = tl.min(tl.where(reached, numbers, 2147483647), axis=0)
        passes += 1
    return lo


@triton.jit
def _weigh_tile(keys, mass, threshold, numbers, masses):
    is_above = keys >= threshold
    return numbers + is_above.to(tl.int32), masses + tl.where(is_above, mass, 0.0)


@triton.jit
def _at(values, index):
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0), axis=0).to(tl.int32)


@triton.jit
def _as_four(a, b, c, d):
    step = tl.arange(0, 4)
    return tl.where(step < 2, tl.where(step == 0, a, b), tl.where(step == 2, c, d))


@triton.jit
def _weigh(row_logits, vocabulary, cut, thresholds, top, scale, LENGTH: tl.constexpr):
    """Of ids at or before the cut with a key at or above each threshold [4]: the number, int32, and mass, fp64.

    The mass of an id is ``2^((logit - top) * scale)``. Each lane keeps its own sums to the end: no barrier on the way.
    """
    t0, t1, t2, t3 = _at(thresholds, 0), _at(thresholds, 1), _at(thresholds, 2), _at(thresholds, 3)
    n0, m0 = tl.zeros([LENGTH], tl.int32), tl.zeros([LENGTH], tl.float32)
    n1, m1, n2, m2, n3, m3 = n0, m0, n0, m0, n0, m0
    cut_key, cut_id = (cut >> _ID_BITS).to(tl.int32), _ID_MASK - (cut & _ID_MASK).to(tl.int32)
    lane = tl.arange(0, LENGTH)
    for start in range(0, vocabulary, 2 * LENGTH):
        ids = start + lane
        values = tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf"))
        more = tl.load(row_logits + ids + LENGTH, mask=ids + LENGTH < vocabulary, other=float("-inf"))
        for half in tl.static_range(2):
            if half == 1:
                ids += LENGTH
                values = more
            keys = ordered(values)
            keys = tl.where((keys == cut_key) & (ids > cut_id), -2147483648, keys)
            mass = tl.exp2((values - top) * scale)
            n0, m0 = _weigh_tile(keys, mass, t0, n0, m0)
            n1, m1 = _weigh_tile(keys, mass, t1, n1, m1)
            n2, m2 = _weigh_tile(keys, mass, t2, n2, m2)
            n3, m3 = _weigh_tile(keys, mass, t3, n3, m3)
    numbers = _as_four(tl.sum(n0, axis=0), tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0))
    masses = _as_four(
        tl.sum(m0.to(tl.float64), axis=0),
        tl.sum(m1.to(tl.float64), axis=0),
        tl.sum(m2.to(tl.float64), axis=0),
        tl.sum(m3.to(tl.float64), axis=0),
    )
    return numbers, masses


@triton.jit
def _collect_near(row_logits, listed, num_listed, vocabulary, cut, lo, hi, near, counter, TILE: tl.constexpr):
    """Write the places of ids at or before the cut with lo <= key < hi, up to the buffer's end; -> how many there are.

    Their order in the buffer is left to chance, and nothing depends on it.
    """
    tl.debug_barrier()  # the buffer's last readers are done
    tl.store(counter, 0)
    tl.debug_barrier()
    lane = tl.arange(0, TILE * _GROUP)
    start = num_listed * 0
    while start < num_listed:
        index = start + lane // _GROUP
        group = tl.load(listed + index, mask=index < num_listed, other=_BEYOND)
        ids = group * _GROUP + lane % _GROUP
        keys = ordered(tl.load(row_logits + ids, mask=ids < vocabulary, other=float("-inf")))
        places = place_of(keys, ids)
        is_near = (keys >= lo.to(tl.int32)) & (keys < hi.to(tl.int32)) & (places >= cut)
        slots = tl.atomic_add(counter + lane * 0, 1, mask=is_near, sem="relaxed", scope="cta")
        tl.store(near + slots, places, mask=is_near & (slots < _CAPACITY))
        start += TILE
    tl.debug_barrier()
    return tl.load(counter, volatile=True)


@triton.jit
def bracket(
    row_logits,
    listed,
    num_listed,
    vocabulary,
    cut,
    near,
    counter,
    lo,
    hi,
    guess,
    target,
    share,
    top,
    scale,
    BY_NUMBER: tl.constexpr,
    TILE: tl.constexpr,
    LENGTH: tl.constexpr,
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
            thresholds = _thresholds(lo, hi, scale, passes, 4)
            numbers, masses = _weigh(row_logits, vocabulary, cut, thresholds, top, scale, LENGTH)
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
            number = _collect_near(row_logits, listed, num_listed, vocabulary, cut, lo, hi, near, counter, TILE)
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
def _weight_before(places, weights, near, number):
    """For each place [CAPACITY] the weight of places that come before it, int64."""
    lane = tl.arange(0, _CAPACITY)
    tl.store(near + _CAPACITY + lane, weights)
    tl.debug_barrier()
    before = tl.zeros([_CAPACITY], tl.int64)
    start = number * 0
    while start < number:
        other = start + tl.arange(0, 32)
        other_place = tl.load(near + other, mask=other < number, other=-9223372036854775808)
        other_weight = tl.load(near + _CAPACITY + other, mask=other < number, other=0)
        before += tl.sum(tl.where(other_place[:, None] > places[None, :], other_weight[:, None], 0), axis=0)
        start += 32
    return before


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
    """The place of the last id that is kept, once ``bracket`` has filled the buffer.

    Weights are integers (masses in units of 2^-45 of the greatest), so that sums do not depend on their order.
    """
    unit = 1.0 if BY_NUMBER else _MASS_UNIT
    if number <= _CAPACITY:
        lane = tl.arange(0, _CAPACITY)
        places = tl.load(near + lane, mask=lane < number, other=-9223372036854775808)
        is_left = (lane < number) & (places >= cut)
        weights = is_left.to(tl.int64)
        if not BY_NUMBER:
            values = value_of((places >> _ID_BITS).to(tl.int32)).to(tl.float64)
            distance = tl.where(is_left, (values - top.to(tl.float64)) / temperature.to(tl.float64), 0.0)
            weights *= (tl.exp(distance) * (1.0 / _MASS_UNIT) + 0.5).to(tl.int64)
        target = tl.where(target < 0, share * (above + tl.sum(weights, axis=0).to(tl.float64) * unit), target)
        before = above + _weight_before(places, weights, near, number).to(tl.float64) * unit
        # An id stays while the weight before it has not reached the target.
        last = tl.min(tl.where(is_left & (before < target), places, 9223372036854775807), axis=0)
        place = tl.minimum(last, tl.max(tl.where(is_left, places, lo << _ID_BITS), axis=0))
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
