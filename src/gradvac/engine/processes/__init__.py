"""The same between processes: everyone's task gradients, put together exactly.

_exchange.py     task gradients of several processes become one update
_shards.py       what every process has of the parameters
_buckets.py      parameters that are exchanged at once
_agreement.py    what the processes tell each other before
_distributed.py  all collectives of this library: every one is in this file
"""

from gradvac.engine.processes._agreement import digest
from gradvac.engine.processes._distributed import RankError, Ranks
from gradvac.engine.processes._exchange import Exchange
from gradvac.engine.processes._shards import sharded_modules, whole

__all__ = ["Exchange", "RankError", "Ranks", "digest", "sharded_modules", "whole"]
