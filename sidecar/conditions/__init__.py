"""The judge: from facts to published conditions and a verdict. Pure; what it must remember it returns."""

from sidecar.conditions.judge import Judgement, Memory, judge
from sidecar.conditions.relevance import Effective, effective

__all__ = ["Effective", "Judgement", "Memory", "effective", "judge"]
