// One translation unit, compiled where it runs: see native/library.py.
#include "agent.h"
#include "gaussian.h"
#include "linear.h"
#include "polar.h"
