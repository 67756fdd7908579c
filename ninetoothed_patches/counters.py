"""What `cache_info()` returns."""

import collections
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """What became of the calls so far.

    :param hits: Calls that were launched from a plan.
    :param misses: Calls that went the ordinary way because there was no plan. One was made (unless they raised), or, where
        many plans were made for nothing before, is made when the call comes again.
    :param bypasses: Calls that went the ordinary way because a plan could not be proved the same, by reason.
    :param evictions: Plans that had to go because the cache was full.
    :param plans: How many plans are held now.
    :param bound: How many a handle may hold.
    :param handles: The same for each handle, by the kernel's name and a number.
    """

    hits: int = 0
    misses: int = 0
    bypasses: dict = dataclasses.field(default_factory=dict)
    evictions: int = 0
    plans: int = 0
    bound: int | None = None
    handles: dict = dataclasses.field(default_factory=dict)


def total(handles, bound):
    """The sum over `handles`, a mapping of names to `CacheInfo`."""

    bypasses = collections.Counter()

    for info in handles.values():
        bypasses.update(info.bypasses)

    def add(counter):
        return sum(getattr(info, counter) for info in handles.values())

    return CacheInfo(
        hits=add("hits"),
        misses=add("misses"),
        bypasses=dict(bypasses),
        evictions=add("evictions"),
        plans=add("plans"),
        bound=bound,
        handles=handles,
    )
