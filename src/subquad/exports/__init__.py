"""Networks for other engines: written as ONNX, as PyTorch's own program, as a compiled package, or for OpenVINO.

formats.py     EXPORTERS: the formats, a row each; register_exporter
programs.py    a network as a program of torch.export, for any batch and any size of image
pt2_format.py onnx_format.py aoti_format.py openvino_format.py    a format each: how it is written, how it is run
checking.py    what was written against the network
file_notes.py  what a file says beside: classes, how images are brought to it
quantizing.py  linear layers in int8
engines.py     what was written, opened again in the network's place
exporting.py   export: traced, written aside, checked, moved into place
"""

from subquad.exports.engines import in_engine, open_exported
from subquad.exports.exporting import DTYPES, Exported, export, exporter_named
from subquad.exports.file_notes import notes_of
from subquad.exports.formats import EXPORTERS, Exporter, register_exporter

__all__ = [
    "DTYPES",
    "EXPORTERS",
    "Exported",
    "Exporter",
    "export",
    "exporter_named",
    "in_engine",
    "notes_of",
    "open_exported",
    "register_exporter",
]
