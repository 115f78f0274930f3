from kbf.export import (
    onnx_linalg as onnx_linalg,
    step as step,
)
