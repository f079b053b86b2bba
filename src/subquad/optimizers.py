"""Which optimizers training and conversion take: timm's, by name."""

from timm.optim import list_optimizers

# adahessian differentiates gradients, whose graph the loops do not keep
OPTIMIZERS = tuple(name for name in list_optimizers() if name != "adahessian")
