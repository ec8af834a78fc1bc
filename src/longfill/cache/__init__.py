"""Pages, records, prefix hashes and the pool that hands them out."""

from longfill.cache.layout import RecordLayout
from longfill.cache.manager import KVCacheManager, PrefixHit, PrefixStats
from longfill.cache.prefix import PrefixIdentity

__all__ = ["KVCacheManager", "PrefixHit", "PrefixIdentity", "PrefixStats", "RecordLayout"]
