"""The fold: from the uses of a component to its Gram matrix, its weights and `.grad`.

_components.py  which parameters share one Gram matrix
_buffers.py     the uses of one parameter
_collector.py   collects uses, and folds components as they complete
_stored.py      task gradients that are stored, and folded at the end
_metric.py      what Gram matrices see of task gradients
_update.py      the waist to the rules, and the way into `.grad`
"""

from gradvac.engine.fold._collector import Collector, Write
from gradvac.engine.fold._components import Components, Granularity, split
from gradvac.engine.fold._metric import AdamMetric, Metric
from gradvac.engine.fold._stored import Stored
from gradvac.engine.fold._update import Weigh, add_to_grad

__all__ = [
    "AdamMetric",
    "Collector",
    "Components",
    "Granularity",
    "Metric",
    "Stored",
    "Weigh",
    "Write",
    "add_to_grad",
    "split",
]
