// One translation unit, compiled where it runs: see kernels/cpu/library.py.
#include "agent.h"
#include "gaussian.h"
#include "linear.h"
#include "polar.h"
