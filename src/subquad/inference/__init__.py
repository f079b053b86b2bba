"""Networks made ready for inference: weights in the dtype that is computed in, and steps that can be one made one.

What a kernel computes in one step no hook on the steps sees, so that this has to be asked for.
"""

from subquad.inference.optimizing import check_computes, in_evaluation, optimize

__all__ = ["check_computes", "in_evaluation", "optimize"]
