"""The judge: from facts to published conditions and a verdict. Pure; what it must remember it returns."""

from sidecar.conditions.judge import Judgement, Memory, judge
from sidecar.conditions.relevance import NO_OVERRIDES, Effective, Overrides, effective

__all__ = ["NO_OVERRIDES", "Effective", "Judgement", "Memory", "Overrides", "effective", "judge"]
