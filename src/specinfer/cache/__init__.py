"""K/V slots: pools, tables and the prefix cache. Rollback is bookkeeping; no K/V is copied or moved."""

from specinfer.cache.allocator import SlotAllocator
from specinfer.cache.pool import KVPool
from specinfer.cache.prefix import PrefixCache
from specinfer.cache.slot_table import SlotTable

__all__ = ["KVPool", "PrefixCache", "SlotAllocator", "SlotTable"]
