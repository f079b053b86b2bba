"""PyTorch's pickled files, read without running anything from them.

Training scripts pickle their configuration beside the weights (a yacs CfgNode, an argparse Namespace). torch's own
`weights_only` then refuses the whole file. Here every class and function that tensors do not need becomes an inert
object: it is made, filled and thrown away, and nothing that the file names is imported or called.
"""

import collections
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

from subquad.errors import SubquadError

TENSOR_PARTS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
}
"""All that a file may name: what a state dict is made of."""


class Inert(dict[Any, Any]):
    """Stands for any object of a class that we do not load: takes whatever pickle hands it, keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class TensorUnpickler(pickle.Unpickler):
    """An unpickler that knows tensors and makes everything else inert."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in TENSOR_PARTS:
            return TENSOR_PARTS[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or (isinstance(found, type) and name.endswith("Storage")):
            return found
        return Inert


# what torch.load wants of a pickle module
_tensors_only = types.SimpleNamespace(
    __name__="tensors_only",
    Unpickler=TensorUnpickler,
    UnpicklingError=pickle.UnpicklingError,
    load=lambda file, **settings: TensorUnpickler(file, **settings).load(),
)


def read_pickle(path: Path) -> Any:
    """The content of a file that torch.save wrote, its tensors real and the rest plain data or inert.

    Raises:
        SubquadError: if it is no such file, in one line.
    """
    try:
        if _is_program(path):
            raise SubquadError(f"{path} is a TorchScript program, which is code: save its state_dict instead")
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_tensors_only)
    except SubquadError:
        raise
    except Exception as error:
        # a damaged file can fail in any way
        reason = str(error).partition("\n")[0] or "it is empty or cut short"
        raise SubquadError(f"{path} is no file of PyTorch weights, or is damaged: {reason}") from None


def _is_program(path: Path) -> bool:
    """Whether a file is TorchScript, which torch.load would hand to its compiler."""
    return zipfile.is_zipfile(path) and any(name.endswith("constants.pkl") for name in zipfile.ZipFile(path).namelist())
