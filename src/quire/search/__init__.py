"""Search at inference time: more tokens spent on a prompt for a better answer, over shared prefixes."""

from quire.search.best import best_of_n, self_consistency
from quire.search.result import Candidate, Saved, SearchResult
from quire.search.steps import StepSearch, step_search
from quire.search.verify import ScoreBy, Verifier

__all__ = ["Candidate", "Saved", "ScoreBy", "SearchResult", "StepSearch", "Verifier", "best_of_n", "self_consistency",
           "step_search"]  # fmt: skip
