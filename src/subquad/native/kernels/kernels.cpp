// One translation unit, compiled where it runs: see native/library.py.
#include "linear.h"
#include "maps.h"
#include "polar.h"
