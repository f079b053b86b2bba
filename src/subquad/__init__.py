"""subquad: sub-quadratic attention for vision.

import subquad

model = subquad.create_model("agent_swin_tiny")
model = subquad.create_model("deit_tiny", attention="agent", img_size=224, num_agents=49)
"""

from subquad.attention import ATTENTION
from subquad.backends import BACKENDS, use_backend
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models import convert_checkpoint, create_model, load_checkpoint, restore_model, save_weights

__version__ = "0.1.0"

__all__ = [
    "ATTENTION",
    "BACKENDS",
    "SubquadError",
    "TokenGrid",
    "convert_checkpoint",
    "create_model",
    "load_checkpoint",
    "restore_model",
    "save_weights",
    "use_backend",
]
