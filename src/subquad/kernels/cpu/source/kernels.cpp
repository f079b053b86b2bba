// One translation unit, compiled where it runs: see kernels/cpu/library.py.
#include "agent.h"
#include "soft.h"
#include "states.h"
#include "state_parts.h"
#include "inline.h"
#include "pola.h"
#include "polapp.h"
#include "mlp.h"
