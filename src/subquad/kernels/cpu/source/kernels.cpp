// One translation unit, compiled where it runs: see kernels/cpu/library.py.
#include "agent.h"
#include "soft.h"
#include "linear.h"
#include "pola.h"
#include "mlp.h"
