"""What can be wrong inside the scheduler, as opposed to what a peer or a caller did."""


class InvariantViolation(Exception):
    """Two pieces of the scheduler's state contradict each other: a defect of this program."""


class OutOfBlocks(Exception):
    """A block was taken from an empty pool: the taker must ask `num_free` first."""


class BadResult(Exception):
    """A worker's result does not answer the oldest outstanding plan: the worker cannot be trusted any more."""
